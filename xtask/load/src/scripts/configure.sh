# Puts the new configuration in place, and keeps one that differs.
make_directory
if [ -e "$config" ]; then
    # Undone, the load leaves the one that an earlier load kept.
    if [ -e "$config.previous" ]; then cp -p "$config.previous" "$lib/next/config.previous"; fi
    cp -p "$config" "$config.previous"
    : > "$lib/next/replaced"
else
    : > "$lib/next/created"
fi
mv "$lib/next/config.yaml" "$config"
