"""A page of HTML as a browser has it."""

import html.parser

VOID = {"meta", "br", "img", "link", "input", "hr"}
LOADING = {"script", "link", "iframe", "object", "img"}  # tags that load or run something
_REFERENCES = ("src", "srcset", "href", "xlink:href", "action", "data", "poster")


class Page(html.parser.HTMLParser):
    """Its text, names and references; tags must match, and nothing has a handler of events."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.ids, self.sections, self.references = [], [], [], [], []
        self.tags = set()
        self.feed(text)
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
                self.sections += [value] if tag == "section" else []
            if name in _REFERENCES:
                self.references.append(value)
            assert not name.startswith("on")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())
