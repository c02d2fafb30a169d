# Puts the new configuration in place, and keeps one that differs.
install -d -m 0700 "$(dirname "$config")"
# The directory that the default configuration names. A mode that somebody else chose stays.
[ -d "$records" ] || install -d -m 0700 "$records"
if [ -e "$config" ]; then
    cp -p "$config" "$config.previous"
    : > "$lib/next/replaced"
else
    : > "$lib/next/created"
fi
mv "$lib/next/config.yaml" "$config"
