# For start.sh and stop.sh.
process_of() { # FILE: print the process whose id the file holds, if it still runs and is one of Flower's
  local number words
  number=$(cat "$1" 2> /dev/null) || return 1
  # A process has no words for an instant while another program takes its place, and none for good once it has ended.
  for _ in 1 2 3 4 5; do
    kill -0 "$number" 2> /dev/null || return 1
    [ -d /proc/self ] || break
    words=$(tr '\0' ' ' 2> /dev/null < "/proc/$number/cmdline") || return 1
    case "$words" in
      *flower* | *fedalign*) break ;;
      ?*) return 1 ;; # the id belongs to another process by now
    esac
    sleep 0.1
    words=
  done
  [ ! -d /proc/self ] || [ -n "$words" ] || return 1
  echo "$number"
}
