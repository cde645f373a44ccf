"""The live page: a model behind a small server on this machine; its heads answer as one types and clicks."""
