# For start.sh and stop.sh.
process_of() { # FILE: print the process whose id the file holds, if it still runs and is one of Flower's
  local number
  number=$(cat "$1" 2> /dev/null) && kill -0 "$number" 2> /dev/null || return 1
  # The id may belong to another process by now.
  [ ! -r "/proc/$number/cmdline" ] || grep -qaE 'flower|fedalign' "/proc/$number/cmdline" || return 1
  echo "$number"
}
