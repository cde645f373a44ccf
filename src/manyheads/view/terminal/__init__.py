"""What the verbs print: tables, summaries and cards for people, JSON for machines."""
