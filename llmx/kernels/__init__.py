"""One hand-written or wrapped kernel per file; each works on one device's arrays."""
