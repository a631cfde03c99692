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

source slurm/quote.sh
target='' out='' template='' stages=(generate eesd calibrate evaluate)
declare -A options_of=([generate]='' [eesd]='' [calibrate]='' [evaluate]='') # options of each stage, one a line
for argument in "$@"; do
  stage=${argument%%.*}
  case $argument in
  target=*) target=$(unquote "${argument#*=}") ;;
  out_dir=*) out=$(unquote "${argument#*=}") ;;
  template=*) template=${argument#*=} ;;
  generate.*=* | eesd.*=* | calibrate.*=* | evaluate.*=*) options_of[$stage]+=${argument#*.}$'\n' ;;
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

# set_default STAGE KEY VALUE: unless the user gave the option. Hydra refuses a second choice of the same group.
set_default() { grep -q "^$2=" <<<"${options_of[$1]}" || options_of[$1]+=$2=$3$'\n'; }
# The user's option of stage generate; the value of a key in a file of conf/, if the file is there.
generate_option() { sed -n "s/^$1=//p" <<<"${options_of[generate]}"; }
# pass_arguments STAGE KEY: the chat template's arguments of stage generate, unless the stage has some.
pass_arguments() {
  local lines
  lines=$(sed -n "s/^data\.chat_template_kwargs/$2/p" <<<"${options_of[generate]}")
  [ -z "$lines" ] || grep -q "^$2" <<<"${options_of[$1]}" || options_of[$1]+=$lines$'\n'
}
read_yaml() { [ ! -f "conf/$2.yaml" ] || sed -n "s/^$1: //p" "conf/$2.yaml"; }
[ -z "$template" ] || set_default generate data.template "$template"
answer_template=$(generate_option data.template) # else the experiment's or the data set's, which is sharegpt
experiment=experiment/$(generate_option experiment) data=$(generate_option data)
[ -n "$answer_template" ] || answer_template=$(read_yaml ' *template' "$experiment")
[ -n "$data" ] || data=$(read_yaml ' *- override \/data' "$experiment")
[ -n "$answer_template" ] || answer_template=$(read_yaml template "data/${data:-sharegpt}")
for stage in eesd calibrate; do
  grep -q '^experiment=' <<<"${options_of[$stage]}" || set_default "$stage" data responses
  if grep -qx 'data=responses' <<<"${options_of[$stage]}"; then
    answers=data
  elif grep -qx 'data=self_distillation' <<<"${options_of[$stage]}"; then
    answers=data.mix.generated
    [ -z "$template" ] || set_default "$stage" data.mix.open.template "$template"
  else
    [ -z "$template" ] || grep -q '^experiment=' <<<"${options_of[$stage]}" || set_default "$stage" data.template "$template"
    continue
  fi
  set_default "$stage" $answers.path "$(quote "$out/responses/responses-*.jsonl")"
  [ -z "$answer_template" ] || set_default "$stage" $answers.template "$answer_template"
  pass_arguments "$stage" $answers.chat_template_kwargs
done
[ -z "$template" ] || set_default evaluate template "$template"
pass_arguments evaluate chat_template_kwargs
set_default evaluate method '[eesd_beta,eesd_cali]'

previous_job=''
submit() { # STAGE SCRIPT ARGUMENTS…
  local stage=$1 overrides options=()
  shift
  mapfile -t overrides < <(printf %s "${options_of[$stage]}")
  local extra=${stage^^}_SBATCH
  read -ra options <<<"${!extra:-}"
  previous_job=$(sbatch --parsable --job-name="outrider-$stage" ${previous_job:+"--dependency=afterok:$previous_job"} \
    --kill-on-invalid-dep=yes "${options[@]}" "$@" "${overrides[@]}")
  previous_job=${previous_job%%;*} # "id;cluster" where there are several
  echo "$stage $previous_job"
}
train=slurm/train.sbatch
path_in_out() { quote "$out/$1"; }
submit generate $train data_prep/generate_responses.py target="$(quote "$target")" out_dir="$(path_in_out responses)" \
  resume=true
submit eesd $train train/eesd.py target="$(quote "$target")" out_dir="$(path_in_out eesd)" resume=true
submit calibrate $train train/calibrate.py checkpoint="$(path_in_out eesd)" out_dir="$(path_in_out calibrate)" resume=true
submit evaluate slurm/evaluate.sbatch checkpoint="$(path_in_out eesd)" out_dir="$(path_in_out evaluate)" resume=true
