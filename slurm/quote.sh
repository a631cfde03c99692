# shellcheck shell=bash
# quote TEXT: a path as a value that Hydra reads as exactly this text. unquote VALUE: the text of such a value.
quote() {
  if [[ $1 =~ ^[A-Za-z_/.][A-Za-z0-9_/.*-]*$ ]]; then
    printf %s "$1"
  else
    sed -Ez -e "s/(\\\\*)(\\$\{|')/\1\1\\\\\2/g" -e 's/(\\+)$/\1\1/' -e "s/.*/'&'/" < <(printf %s "$1")
  fi
}
unquote() {
  case $1 in
  \'*\' | \"*\") printf %s "${1:1:-1}" ;;
  *) printf %s "$1" ;;
  esac
}
