# Waits up to $1 seconds until the previous agent, process $2, has ended.
await_ended "$2" "$1" || fail "the previous agent, process $2, still runs after $1 s"
