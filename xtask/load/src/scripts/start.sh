# Starts the service and waits up to $1 seconds until it is ready. It takes over from the bridge, if that runs.
if ! systemctl restart "$service"; then
    show_unit "$service"
    fail "the service does not start"
fi
await_ready "$binary" "$(main_of "$service")" "$1" ||
    fail "the agent is not ready after $1 s; see \`xdp-imds status\`"
