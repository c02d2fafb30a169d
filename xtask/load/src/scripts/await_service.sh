# Waits up to $1 seconds until the previous agent of the service has ended.
await_stopped "$service" "$1" || fail "the previous agent still runs after $1 s; see \`systemctl status $service\`"
