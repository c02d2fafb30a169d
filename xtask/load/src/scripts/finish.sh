# Removes what only a load needs.
rm -rf "$lib/next"
