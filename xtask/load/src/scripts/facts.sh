# Prints what a plan depends on, one `name=value` a line.
echo "machine=$(uname -m)"
echo "kernel=$(uname -r)"
if has_systemd; then
    echo systemd=yes
    if [ "$(state_of "$service")" = active ]; then
        echo active=yes
        echo "pid=$(main_of "$service")"
    fi
fi
for file in /usr/bin/xdp-imds /lib/systemd/system/xdp-imds.service /usr/lib/systemd/system/xdp-imds.service; do
    owner=$(dpkg-query --search "$file" 2>/dev/null | sed -n '1s/:.*//p')
    if [ -n "$owner" ]; then
        echo "package=dpkg $owner"
        break
    fi
    if owner=$(rpm -qf --queryformat '%{NAME}' "$file" 2>/dev/null); then
        echo "package=rpm $owner"
        break
    fi
done
if [ -x "$binary" ]; then echo "version=$("$binary" --version || echo unknown)"; fi
previous=$(earlier)
if [ -n "$previous" ]; then echo "previous=$("$previous" --version || echo unknown)"; fi
if [ -e "$unit" ]; then
    if grep -q "$mark" "$unit"; then echo unit=ours; else echo unit=foreign; fi
fi
if [ -e "$config" ]; then echo config=yes; fi
if [ -e "$lib" ]; then echo lib=yes; fi
if ! has_systemd; then
    if [ -e "$pidfile" ]; then echo pidfile=yes; fi
    if pid=$(recorded); then echo "pid=$pid"; fi
fi
