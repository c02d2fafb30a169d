#!/bin/sh
# Stands for a hypervisor: notes its arguments and what the agent says of the VM, and boots no guest. It says what the
# last stage of cloud-init says, in pieces as a console does, unless QUICK is set.
{
  for word; do printf '%s\n' "$word"; done
} >"$NOTES/arguments"
for word; do [ ! -f "$word" ] || cp "$word" "$NOTES/"; done
xdp-imds get --run "$RUN" --json "$NAME" >"$NOTES/instance.json"
ip -json link show "$NAME" >"$NOTES/link.json"
[ -z "${QUICK:-}" ] || exit 7
say() {
  printf '%b' "$said"
  for word; do
    case $word in file:/* | file=/*) printf '%b' "$said" >>"${word#file?}" ;; esac
  done
}
said='Cloud-init v. 22.4.2 finished at now. Datasource Data'
say "$@"
sleep 3 # longer than the script's pause between two looks
said='SourceNoCloudNet.  Up 21.40 seconds\n'
say "$@"
exec sleep 600
