# shellcheck shell=sh
# What the recipes share. A recipe sources this file, calls `usage_of "$@"` and `prepare`, starts its
# hypervisor and calls `finish`.
#
#   NAME       the VM's name, which its tap has too [vm-1]
#   BRIDGE     a bridge with DHCP, for the tap [none]
#   USER_DATA  a file with user-data [none]
#   RUN        the run directory of the agent [/run/xdp-imds]
#   PATIENCE   seconds until cloud-init must be done [300]
#   KEEP       1: the VM runs until it ends or this script is interrupted

set -eu
umask 077 # the record holds user-data, and the console may show secrets

name=${NAME:-vm-1}
run=${RUN:-/run/xdp-imds}
# NoCloud's seed, where cloud-init looks for it: in the SMBIOS serial or on the kernel's command line.
# shellcheck disable=SC2034 # the recipes use these
seed='ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/'
# The same VM has the same MAC and UUID each time.
digest=$(printf '%s/%s' "$(uname -n)" "$name" | sha256sum)
mac=02:$(echo "$digest" | sed 's/^\(..\)\(..\)\(..\)\(..\)\(..\).*/\1:\2:\3:\4:\5/')
uuid=$(echo "$digest" | sed 's/^\(.\{8\}\)\(.\{4\}\)\(.\{4\}\)\(.\{4\}\)\(.\{12\}\).*/\1-\2-\3-\4-\5/')
room=
tap=
registered=
hypervisor=

fail() {
  echo "$0: $*" >&2
  exit 1
}

# Prints the head of the script, which says what it takes, if it is called without arguments or for help.
usage_of() {
  case ${1:-} in
    '' | -h | --help | help) ;;
    *) return 0 ;;
  esac
  [ $# -gt 0 ] || exec >&2
  echo "Usage: $0 $(sed -n 's|^#.* ./boot.sh ||p' "$0")"
  echo
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  echo
  echo "Variables [default]:"
  sed -n '/^#   [A-Z]/s/^# *//p' "$here/../common.sh" | sed 's/^/  /'
  if [ $# -gt 0 ]; then exit 0; fi
  exit 2
}

# Takes out what is there, in the opposite order of its making: also after an error or Ctrl-C.
leave() {
  status=$?
  trap - EXIT
  trap '' HUP INT TERM
  if [ -n "$hypervisor" ]; then
    kill "$hypervisor" 2>/dev/null || :
    wait "$hypervisor" 2>/dev/null || :
  fi
  [ -z "$registered" ] || xdp-imds rm --run "$run" --force "$name" || {
    echo "$0: $name may still be registered; once an agent answers: xdp-imds rm --run $run --force $name" >&2
    status=1
  }
  [ -z "$tap" ] || ip link del "$tap" || status=1
  [ -z "$room" ] || rm -rf "$room"
  exit "$status"
}

# Makes the tap and registers the VM, unless the hypervisor $1 is missing. The agent serves the tap when this returns.
prepare() {
  command -v "$1" >/dev/null || fail "there is no $1 in PATH; install it first"
  [ -z "${USER_DATA:-}" ] || [ -f "$USER_DATA" ] || fail "expected a file in USER_DATA, found none at $USER_DATA"
  trap leave EXIT
  trap 'exit 130' HUP INT TERM
  room=$(mktemp -d)
  console=$room/console
  [ "${#name}" -le 15 ] || fail "expected a NAME of at most 15 bytes, which the tap has too; found $name"
  ip tuntap add "$name" mode tap || fail "cannot make the tap $name; is there one, or are you not root?"
  tap=$name
  [ -z "${BRIDGE:-}" ] || ip link set "$tap" master "$BRIDGE" ||
    fail "cannot put the tap on the bridge $BRIDGE; make it first, with DHCP for the guest"
  ip link set "$tap" up
  cat >"$room/record.yaml" <<EOF
schema: vmrecord/1
generation: 1
vm: {uuid: $uuid, name: $name, project: {id: recipes, number: 1, account: "000000000000"}}
hostname: {short: $name}
placement: {region: local, zone: local-a}
network: {nics: [{id: n0, name: eth0, mac: "$mac", port: {ifname: $tap}, addresses: [{method: dhcp4}]}]}
EOF
  if [ -n "${USER_DATA:-}" ]; then
    cp "$USER_DATA" "$room/user-data"
    echo 'user_data: {source: {file: user-data}}' >>"$room/record.yaml"
  fi
  code=0
  registered=1 # before the call, which may be interrupted
  xdp-imds register --run "$run" --new --wait --file "$room/record.yaml" || code=$?
  if [ "$code" -eq 4 ]; then
    registered=
    fail "another VM is registered as $name, or has its MAC or port; set NAME to another name"
  fi
  # No agent runs, or it was silent after it had stored the record, which `leave` then removes.
  [ "$code" -ne 5 ] || fail "no agent answers; start it first, or set RUN to its run directory"
  [ "$code" -eq 0 ] || fail "cannot register $name"
  : >"$console"
}

# Waits until cloud-init is done. $1 is the hypervisor's process.
finish() {
  hypervisor=$1
  left=${PATIENCE:-300}
  # A console takes the line in pieces: it is whole with the last word.
  until grep -a 'Cloud-init v\. .* finished at .* Up .* seconds' "$console"; do
    kill -0 "$hypervisor" 2>/dev/null || { tail -n 20 "$console" >&2; fail "the hypervisor has ended"; }
    [ "$left" -gt 0 ] || { tail -n 20 "$console" >&2; fail "cloud-init is not done after ${PATIENCE:-300} s"; }
    left=$((left - 1))
    sleep 1
  done
  xdp-imds get --run "$run" "$name"
  [ -z "${KEEP:-}" ] || wait "$hypervisor"
}
