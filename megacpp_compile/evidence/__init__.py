"""Which line of attention is proved on which machine, as data: nothing is claimed by prose.

`catalog` says what there is to prove, `record` what a run found and whether it counts, `rollout` the rungs and what
stops one, `gate` what a promotion still lacks, `status` the generated page.
"""
