#!/usr/bin/env bash
# From a target to a measured drafter, as jobs that wait for one another: generate → eesd → calibrate → evaluate.
#
#   bash slurm/pipeline.sh target=MODEL out_dir=runs/mine generate.data=ultrachat evaluate.prompts=mt_bench
#
# STAGE.KEY=VALUE is the option KEY=VALUE of one stage. Stages eesd and calibrate read the responses of stage generate,
# alone or with STAGE.data=self_distillation mixed with other text, by the template that they were asked for with.
# template=vicuna is for all stages; a target without a chat template needs it, such as Vicuna.
# STAGE.experiment=… brings data of its own; there, give their path:
# eesd.data.mix.generated.path=OUT_DIR/responses/responses-*.jsonl. The same line again continues where a failed job
# stopped.
# Options of sbatch: SBATCH_PARTITION and the like for all, GENERATE_SBATCH='--nodes 4 --gpus-per-node 8' (likewise
# EESD_SBATCH, CALIBRATE_SBATCH, EVALUATE_SBATCH) for one.
set -euo pipefail

source slurm/quoted.sh
target='' out='' template='' stages=(generate eesd calibrate evaluate)
declare -A given=([generate]='' [eesd]='' [calibrate]='' [evaluate]='') # options of each stage, one a line
for argument in "$@"; do
  stage=${argument%%.*}
  case $argument in
  target=*) target=$(unquoted "${argument#*=}") ;;
  out_dir=*) out=$(unquoted "${argument#*=}") ;;
  template=*) template=${argument#*=} ;;
  generate.*=* | eesd.*=* | calibrate.*=* | evaluate.*=*) given[$stage]+=${argument#*.}$'\n' ;;
  *)
    echo "error: $argument: expected target=, out_dir=, template= or STAGE.KEY=VALUE with STAGE one of ${stages[*]}" >&2
    exit 2
    ;;
  esac
done
if [ -z "$target" ] || [ -z "$out" ]; then
  echo "usage: bash slurm/pipeline.sh target=MODEL out_dir=runs/mine [template=vicuna] [STAGE.KEY=VALUE …]" >&2
  exit 2
fi

# Hydra refuses a second choice of the same group, so a default gives way to what was given.
default() { grep -q "^$2=" <<<"${given[$1]}" || given[$1]+=$2=$3$'\n'; }
given_as() { sed -n "s/^$1=//p" <<<"${given[generate]}"; }
said_in() { [ ! -f "conf/$2.yaml" ] || sed -n "s/^$1: //p" "conf/$2.yaml"; }
[ -z "$template" ] || default generate data.template "$template"
asked=$(given_as data.template) # by which the responses are asked for; else what their data say, sharegpt by itself
experiment=experiment/$(given_as experiment) data=$(given_as data)
[ -n "$asked" ] || asked=$(said_in ' *template' "$experiment")
[ -n "$data" ] || data=$(said_in ' *- override \/data' "$experiment")
[ -n "$asked" ] || asked=$(said_in template "data/${data:-sharegpt}")
for stage in eesd calibrate; do
  grep -q '^experiment=' <<<"${given[$stage]}" || default "$stage" data responses
  if grep -qx 'data=responses' <<<"${given[$stage]}"; then
    answers=data
  elif grep -qx 'data=self_distillation' <<<"${given[$stage]}"; then
    answers=data.mix.generated
    [ -z "$template" ] || default "$stage" data.mix.open.template "$template"
  else
    [ -z "$template" ] || grep -q '^experiment=' <<<"${given[$stage]}" || default "$stage" data.template "$template"
    continue
  fi
  default "$stage" $answers.path "$(quoted "$out/responses/responses-*.jsonl")"
  [ -z "$asked" ] || default "$stage" $answers.template "$asked"
done
[ -z "$template" ] || default evaluate template "$template"
default evaluate method '[eesd_beta,eesd_cali]'

before=''
submit() { # STAGE SCRIPT ARGUMENTS…
  local stage=$1 overrides options=()
  shift
  mapfile -t overrides < <(printf %s "${given[$stage]}")
  local extra=${stage^^}_SBATCH
  read -ra options <<<"${!extra:-}"
  before=$(sbatch --parsable --job-name="outrider-$stage" ${before:+"--dependency=afterok:$before"} \
    --kill-on-invalid-dep=yes "${options[@]}" "$@" "${overrides[@]}")
  before=${before%%;*} # "id;cluster" where there are several
  echo "$stage $before"
}
train=slurm/train.sbatch
in_out() { quoted "$out/$1"; }
submit generate $train data_prep/generate_responses.py target="$(quoted "$target")" out_dir="$(in_out responses)" \
  resume=true
submit eesd $train train/eesd.py target="$(quoted "$target")" out_dir="$(in_out eesd)" resume=true
submit calibrate $train train/calibrate.py checkpoint="$(in_out eesd)" out_dir="$(in_out calibrate)" resume=true
submit evaluate slurm/evaluate.sbatch checkpoint="$(in_out eesd)" out_dir="$(in_out evaluate)" resume=true
