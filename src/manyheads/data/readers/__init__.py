"""Readers of files: text, tables, FASTA, images, audio, archives."""
