#!/bin/sh
# Stands for a hypervisor: notes its arguments and what the agent says of the VM, and boots no guest. It says what the
# last stage of cloud-init says, unless QUICK is set.
{
  for word; do printf '%s\n' "$word"; done
} >"$NOTES/arguments"
for word; do [ ! -f "$word" ] || cp "$word" "$NOTES/"; done
xdp-imds get --run "$RUN" --json "$NAME" >"$NOTES/instance.json"
ip -json link show "$NAME" >"$NOTES/link.json"
[ -z "${QUICK:-}" ] || exit 7
said='Cloud-init v. 22.4.2 finished at now. Datasource DataSourceNoCloudNet.'
echo "$said"
for word; do
  case $word in file:/* | file=/*) echo "$said" >"${word#file?}" ;; esac
done
exec sleep 600
