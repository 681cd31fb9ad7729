"""Who may call a server: roles and their keys."""
