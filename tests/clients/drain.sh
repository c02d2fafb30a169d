#!/bin/sh
# Waits for what the host will do, saves the guest's work before it, and says that the guest is ready. A systemd unit
# runs it:
#
#   [Service]
#   ExecStart=/usr/local/sbin/drain /usr/local/sbin/save
#   Restart=always
save=$1
events=http://169.254.169.254/v1/events
seen=1
while :; do
    # The answer comes with the next change, or after 60 s.
    news=$(curl -sf --max-time 90 "$events?incarnation=$seen&timeout=60") || { sleep 1; continue; }
    seen=$(echo "$news" | sed -n 's/^{"incarnation":\([0-9]*\),.*/\1/p')
    pending=$(echo "$news" | grep -o '{"id":[^}]*"state":"scheduled"[^}]*}' | grep -v '"acknowledged":')
    for id in $(echo "$pending" | sed -n 's/^{"id":"\([^"]*\)".*/\1/p'); do
        "$save" "$id"
        curl -sf -X POST "$events/$id"
    done
done
