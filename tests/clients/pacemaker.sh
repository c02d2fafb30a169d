#!/bin/sh
# Stands for the command line tools of Pacemaker, by the names that a resource agent calls, in a cluster of two nodes.
# Attributes are files of the directory $CLUSTER, and so are the operations on the guest's node.
last= scope=cluster
for word; do
    case $last in
    --node) scope=$word ;;
    --name) name=$word ;;
    --update) value=$word ;;
    esac
    last=$word
done
attribute=$CLUSTER/$scope.$name
case "${0##*/} $*" in
crm_attribute*--query*) if [ -e "$attribute" ]; then cat "$attribute"; fi ;;
crm_attribute*--delete*) rm -f "$attribute" ;;
crm_attribute*--update*) echo "$value" > "$attribute" ;;
crm_node*--list*) printf '1 node-a member\n2 node-b member\n' ;;
crm_resource*--list-operations*) cat "$CLUSTER/operations" ;;
crm_simulate*) echo 'Transition Summary:' ;;
*) exit 64 ;;
esac
