"""Plans: which rank reads, writes or sends which pieces. Pure, deterministic functions from catalogs to columns.

Every rank that has the same catalogs computes the same plan, so a plan is never communicated.
"""
