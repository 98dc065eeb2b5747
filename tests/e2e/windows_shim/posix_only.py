"""Names that Python has on POSIX systems and not on Windows, those that anybody might use."""

MODULES = (*("fcntl", "resource", "pwd", "grp", "spwd", "crypt", "nis", "termios", "tty", "pty", "syslog", "readline"),)

WHEELS = ("uvloop", "triton", "sgl_kernel")
"""Libraries that are not published for Windows."""

OS_NAMES = (
    *("fork", "forkpty", "posix_spawn", "posix_spawnp", "openpty", "mkfifo", "mknod", "nice", "sync", "pipe2"),
    *("getuid", "geteuid", "getgid", "getegid", "getgroups", "setuid", "setgid", "chown", "fchown", "lchown", "chroot"),
    *("getpgid", "getpgrp", "setpgid", "setpgrp", "getsid", "setsid", "killpg", "wait", "wait3", "wait4", "waitid"),
    *("posix_fadvise", "posix_fallocate", "O_DIRECT", "O_NONBLOCK", "O_SYNC", "O_DSYNC", "sendfile", "lockf"),
    *("pread", "preadv", "pwrite", "pwritev", "readv", "writev", "eventfd", "memfd_create", "fchmod", "ctermid"),
    *("sched_getaffinity", "sched_setaffinity", "sched_yield", "getloadavg", "getpriority", "setpriority"),
)

SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
"""The only ones that both have."""

SIGNAL_CALLS = (
    *("alarm", "getitimer", "setitimer", "pause", "siginterrupt", "sigpending", "sigtimedwait", "sigwait"),
    *("sigwaitinfo", "pthread_kill", "pthread_sigmask", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK"),
)

LOOP_METHODS = (
    *("add_signal_handler", "remove_signal_handler", "subprocess_exec", "subprocess_shell"),
    *("connect_read_pipe", "connect_write_pipe", "create_unix_connection", "create_unix_server"),
)
"""Those that the selector loop lacks there."""
