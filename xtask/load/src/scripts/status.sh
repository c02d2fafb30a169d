# Shows the state of the agent. Its exit code is 0 if nothing needs an operator.
"$binary" status --config "$config" >&2
