"""How replicas along `data` synchronize over slow links."""
