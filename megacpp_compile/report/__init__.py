"""What the compiler says it did: records, the collector, tables, the log, and replay against the plain subgraph."""
