# Begins every script. Rust puts the paths (`binary`, `config`, …) in front of it.
set -eu
umask 022
PATH=$PATH:/usr/local/bin:/usr/sbin:/sbin
LC_ALL=C
export PATH LC_ALL

fail() {
    echo "$*" >&2
    exit 1
}

has_systemd() {
    [ -d /run/systemd/system ]
}

# Whether a process runs. A zombie has no executable.
is_alive() {
    [ -n "$(readlink "/proc/$1/exe" 2>/dev/null)" ]
}

# Prints the process id in the pid file, if that process is an agent.
recorded() {
    [ -e "$pidfile" ] || return 1
    read -r number < "$pidfile" || return 1
    [ "$(cat "/proc/$number/comm" 2>/dev/null)" = xdp-imds ] && is_alive "$number" && echo "$number"
}

# Prints the binary before the present one, if there is one. That is $lib/previous; but while the agent of a load runs that
# ended before its binary was put in place, it is $binary.
earlier() {
    if has_systemd; then number=$(main_of "$bridge"); else number=$(recorded) || number=0; fi
    case $(readlink "/proc/$number/exe" 2>/dev/null) in
    "$lib"/next/*)
        if [ -x "$binary" ] && ! cmp -s "/proc/$number/exe" "$binary"; then
            echo "$binary"
            return 0
        fi
        ;;
    esac
    if [ -x "$lib/previous" ]; then echo "$lib/previous"; fi
}

# Makes an empty $lib/next. The file `made` in it says that no load had made $lib before.
empty_next() {
    made=yes
    if [ -e "$lib" ] && [ ! -e "$lib/next/made" ]; then made=no; fi
    rm -rf "$lib/next"
    mkdir -p "$lib/next"
    if [ "$made" = yes ]; then : > "$lib/next/made"; fi
}

# Makes the directory of the configuration. The file `directory` in $lib/next says that there was none.
make_directory() {
    if [ ! -e "$(dirname "$config")" ]; then : > "$lib/next/directory"; fi
    install -d -m 0700 "$(dirname "$config")"
}

# The state of unit $1: active, inactive, failed, …
state_of() {
    systemctl show --property ActiveState --value "$1"
}

# The process id of unit $1.
main_of() {
    systemctl show --property MainPID --value "$1"
}

# Shows what unit $1 said last.
show_unit() {
    # Its last lines may be on their way.
    journalctl --sync 2>/dev/null || true
    journalctl --no-pager --quiet --output cat --lines 20 --unit "$1" >&2 || true
}

# Waits up to $2 seconds until unit $1 has stopped.
await_stopped() {
    left=$2
    while :; do
        case $(state_of "$1") in inactive | failed) return 0 ;; esac
        [ "$left" -gt 0 ] || return 1
        left=$((left - 1))
        sleep 1
    done
}

# Waits up to $2 seconds until process $1 has ended.
await_ended() {
    left=$2
    while is_alive "$1"; do
        [ "$left" -gt 0 ] || return 1
        left=$((left - 1))
        sleep 1
    done
}

# Whether process $2 answers on the control socket. $1 is the agent's binary.
answers() {
    answer=$("$1" status --json --config "$config" 2>/dev/null | tr -d ' \n') || true
    case $answer in *"\"pid\":$2,"*) return 0 ;; esac
    return 1
}

# Waits up to $3 seconds until process $2 reports in its status what /readyz reports: that it is ready.
await_ready() {
    left=$3
    while :; do
        if answers "$1" "$2"; then
            case $answer in *'"ready":true'*) return 0 ;; esac
        fi
        is_alive "$2" || return 1
        [ "$left" -gt 0 ] || return 1
        left=$((left - 1))
        sleep 1
    done
}

# Starts the agent's binary $1 as a process of its own, whose number is then in $pid.
detach() {
    # As in the unit. Log and state are nobody else's.
    umask 077
    setsid "$1" serve --config "$config" --takeover >>"$log" 2>&1 </dev/null &
    pid=$!
}
