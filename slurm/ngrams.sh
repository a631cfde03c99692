#!/usr/bin/env bash
# An n-gram table built by several machines: an array of jobs, one a part, then a job that merges them.
#
#   bash slurm/ngrams.sh 8 runs/ngrams 'corpus/*.parquet' tokenizer=MODEL 'orders=[2,3,4]' min_count=2 max_mb=2000
#
# It is the table of one build over all files. min_count, max_successors and max_mb apply to the whole. The parts stay in
# OUT_DIR.parts. The same line again continues where a failed job stopped.
set -euo pipefail

if [ $# -lt 4 ] || ! [ "$1" -ge 2 ] 2>/dev/null; then
  echo "usage: bash slurm/ngrams.sh PARTS OUT_DIR 'FILES' tokenizer=MODEL OVERRIDES…, with PARTS at least 2" >&2
  exit 2
fi
compgen -G "${3/#\~\//"${HOME-}"/}" > /dev/null || { echo "error: $3: no file matches" >&2; exit 2; }
parts=$(sbatch --parsable --array="1-$(($1 - 1))" slurm/ngrams.sbatch "$@")
parts=${parts%%;*} # "id;cluster" where there are several
echo "parts $parts"
whole=$(sbatch --parsable --dependency="afterok:$parts" --kill-on-invalid-dep=yes slurm/ngrams.sbatch "$@")
echo "whole ${whole%%;*}"
