# Puts the new configuration in place, and keeps one that differs.
make_directory
if cmp -s "$config" "$lib/next/config.yaml"; then
    # A load that failed later on is run again: what it kept is the configuration before.
    rm "$lib/next/config.yaml"
    echo "the present configuration is the same; it does not become $config.previous" >&2
    exit 0
fi
if [ -e "$config" ]; then
    # Undone, the load leaves the one that an earlier load kept.
    if [ -e "$config.previous" ]; then cp -p "$config.previous" "$lib/next/config.previous"; fi
    cp -p "$config" "$config.previous"
    : > "$lib/next/replaced"
else
    : > "$lib/next/created"
fi
mv "$lib/next/config.yaml" "$config"
