# Reads the new configuration from standard input. It may hold secrets.
mkdir -p "$lib/next"
(umask 077 && cat > "$lib/next/config.yaml")
