#!/bin/sh
# The first process of the guest: loads modules, runs the checks, and switches the machine off. Lines that begin with
# `@@` are the report, which `console.rs` reads.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp NO_COLOR=1
home=/xdp-imds
agent=$home/target/debug/xdp-imds

say() {
  # The kernel's own messages may leave a line unfinished.
  printf '\n@@ %s\n' "$*"
}

# Shows the end of a log. The verifier's lines can be long and many.
show() {
  tail -n "$2" "$1" | cut -c 1-200 | while IFS= read -r line; do say "log $line"; done
}

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
# No mount here: it would hide a tree that was built below /tmp.
mkdir -p /tmp
chmod 1777 /tmp
mount -t tmpfs tmpfs /run
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
say "boot $(uname -r) $(cut -d ' ' -f 1 /proc/uptime)"

while read -r module; do
  insmod "$home/modules/$module" || say "log cannot load $module"
done <$home/modules.list

# Doctor's words decide what this kernel is for: a failing check of the kernel means that the agent refuses to serve.
timeout 300 $agent doctor >/tmp/doctor 2>&1
kernel='^FAIL *\(kernel\.[^ ]*\|rehearsal\|tun\)'
if grep -q "$kernel" /tmp/doctor; then
  grep "$kernel" /tmp/doctor | while IFS= read -r line; do say "refused $line"; done
  ip tuntap add tap0 mode tap && ip link set tap0 up
  mkdir /tmp/records
  timeout 120 $agent serve --records /tmp/records --run /tmp/agent --port tap0 >/tmp/serve 2>&1
  say "serve $?"
  tail -n 60 /tmp/serve | while IFS= read -r line; do say "says $line"; done
  : >$home/checks
fi
tcx=no
grep -q '^ok *kernel\.tcx' /tmp/doctor && tcx=yes

while IFS='|' read -r name needs seconds program tests; do
  if [ "$needs" = tcx ] && [ $tcx = no ]; then
    say "check $name|absent|0|0|0"
    continue
  fi
  say "start $name"
  : >/tmp/privileged
  begin=$(cut -d . -f 1 /proc/uptime)
  # shellcheck disable=SC2086 # the names of tests are words
  XDP_IMDS_PRIVILEGED_LOG=/tmp/privileged timeout --kill-after 10 "$seconds" \
    "$home/target/debug/deps/$program" --exact $tests --show-output --test-threads 1 >/tmp/log 2>&1 </dev/null
  status=$?
  end=$(cut -d . -f 1 /proc/uptime)
  passed=$(sed -n 's/^test result: .* \([0-9]*\) passed;.*/\1/p' /tmp/log)
  # A kernel that is booted here has what a test needs, so `absent` is a fault like `skipped`.
  skipped=$(grep -c '^\(skipped\|absent\)' /tmp/privileged)
  sed -n 's/^\([a-z_]*\): \([0-9]*\) instructions$/\1 \2/p' /tmp/log |
    while IFS= read -r line; do say "instructions $line"; done
  case $status in
    0) outcome=passed ;;
    124 | 137) outcome=timeout ;;
    *) outcome=failed ;;
  esac
  say "check $name|$outcome|$((end - begin))|${passed:-0}|$skipped"
  grep '^\(skipped\|absent\)' /tmp/privileged | while IFS= read -r line; do say "log $line"; done
  [ $outcome = passed ] || show /tmp/log 40
done <$home/checks

say end
echo o >/proc/sysrq-trigger
sleep 60
