"""Who may call a server, and who may read along: roles, their keys, and TLS."""
