"""Records of ArrayRecord files (https://github.com/google/array_record), which grain brings.

A record is the UTF-8 text of a document, or a serialized `tf.train.Example` with a bytes feature.
"""

import functools
from collections.abc import Iterator
from typing import Any

# Sequential: without threads of its own, which would read ahead of what is needed.
_OPTIONS = "readahead_buffer_size:1M,max_parallelism:0"


def values(path: str, start: int) -> Iterator[bytes]:
    """The records from number `start` on.

    Raises ValueError, which names file and record, for damaged files: chunks have checksums.
    """
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise ValueError(
            f"{path}: reading ArrayRecord needs array_record: pip install array_record"
        ) from error
    number = start
    try:
        reader = array_record_module.ArrayRecordReader(path, _OPTIONS)
        if not reader.ok():  # without this, a file that is cut off has 0 records
            raise RuntimeError("it does not end as an ArrayRecord does")
        try:
            count = reader.num_records()
            if 0 < start < count:
                reader.seek(start)
            while number < count:
                yield reader.read()
                number += 1
        finally:
            reader.close()
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{path}: not readable as ArrayRecord at record {number + 1} ({error}): the file is "
            "damaged or cut off; write it again"
        ) from error


def features(record: bytes) -> dict[str, Any] | None:
    """The values of a `tf.train.Example` by feature, lists of bytes, floats or integers.

    None for a record that is none, such as plain text.
    """
    from google.protobuf import message

    if not record.startswith(b"\n"):  # the tag of its only field
        return None
    example = _example_class()()
    try:
        example.ParseFromString(record)
    except message.DecodeError:
        return None
    # What is text by chance parses as unknown fields, if at all.
    if not example.features.feature or example.ByteSize() != len(record):
        return None
    found = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        found[name] = list(getattr(feature, kind).value) if kind else []
    return found


@functools.cache
def _example_class() -> Any:
    """The message class of tensorflow/core/example/example.proto, without tensorflow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="llmx/example.proto", package="llmx", syntax="proto3"
    )
    repeated, single = field.LABEL_REPEATED, field.LABEL_OPTIONAL

    def add(parent: Any, name: str) -> Any:
        holder = parent.message_type if parent is file else parent.nested_type
        holder.add(name=name)
        return holder[-1]

    for name, kind in (
        ("BytesList", field.TYPE_BYTES), ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):  # fmt: skip
        add(file, name).field.add(name="value", number=1, label=repeated, type=kind)
    feature = add(file, "Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        kind = name.title().replace("_", "")
        feature.field.add(
            name=name, number=number, label=single, type=field.TYPE_MESSAGE,
            type_name=f".llmx.{kind}", oneof_index=0,
        )  # fmt: skip
    features = add(file, "Features")
    entry = add(features, "FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=single, type=field.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=single, type=field.TYPE_MESSAGE, type_name=".llmx.Feature"
    )
    features.field.add(
        name="feature", number=1, label=repeated, type=field.TYPE_MESSAGE,
        type_name=".llmx.Features.FeatureEntry",
    )  # fmt: skip
    add(file, "Example").field.add(
        name="features", number=1, label=single, type=field.TYPE_MESSAGE,
        type_name=".llmx.Features",
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("llmx.Example"))
