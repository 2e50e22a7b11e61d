"""Tree mode: candidates, tree, attention, acceptance and KV compaction."""
