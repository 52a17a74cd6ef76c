"""Chat templates in the manner of published models."""

LLAMA3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>

'+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>

' }}{% endif %}"""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# With the marks of what the model writes.
CHATML_MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Of earlier turns the thoughts are dropped, and the last gets empty ones.
QWEN3 = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GEMMA = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}\
{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}\
{% endfor %}"""

# template, kind of tokenizer, whether it takes a system message
STYLES = {
    "llama3": (LLAMA3, "byte_level", True),
    "chatml": (CHATML, "byte_level", True),
    "chatml_marked": (CHATML_MARKED, "byte_level", True),
    "qwen3": (QWEN3, "byte_level", True),
    "gemma": (GEMMA, "byte_level", False),
    "mistral": (MISTRAL, "sentencepiece", False),
    "mistral_unigram": (MISTRAL, "unigram", False),
}
