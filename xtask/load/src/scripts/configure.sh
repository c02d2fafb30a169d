# Puts the new configuration in place, and keeps one that differs.
install -d -m 0700 "$(dirname "$config")"
if [ -e "$config" ]; then
    cp -p "$config" "$config.previous"
    : > "$lib/next/replaced"
else
    : > "$lib/next/created"
fi
mv "$lib/next/config.yaml" "$config"
