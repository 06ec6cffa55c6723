/* Descriptors that wait, notify and travel. */
#include "conform.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/sendfile.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>

static void polls(void)
{
	int ends[2], ep = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN }, got;

	pipe(ends);
	say_call("add", epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &event));
	say_call("again", epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &event));
	say("empty %d", epoll_wait(ep, &got, 1, 10));
	write(ends[1], "ab", 2);
	say("level %d %d", epoll_wait(ep, &got, 1, 1000), epoll_wait(ep, &got, 1, 1000));
	event.events = EPOLLIN | EPOLLET;
	epoll_ctl(ep, EPOLL_CTL_MOD, ends[0], &event);
	say("edge %d %d", epoll_wait(ep, &got, 1, 1000), epoll_wait(ep, &got, 1, 10));
	close(ends[1]);
	say("hang-up %d", epoll_wait(ep, &got, 1, 1000));
	say("events %x", got.events);
}

static void events(void)
{
	int fd = eventfd(3, EFD_NONBLOCK | EFD_SEMAPHORE);
	uint64_t value;

	for (int i = 0; i < 4; i++)
		if (read(fd, &value, 8) == 8)
			say("%lu", value);
		else
			say_call("read", -1);
	value = -1UL;
	say_call("too much", write(fd, &value, 8));
}

static void signals_as_files(void)
{
	struct signalfd_siginfo info;
	sigset_t set;
	int fd;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd = signalfd(-1, &set, SFD_NONBLOCK);
	say_call("none", read(fd, &info, sizeof(info)));
	raise(SIGUSR1);
	say_call("one", read(fd, &info, sizeof(info)));
	say("signal %d from here %d", info.ssi_signo, info.ssi_pid == (unsigned)getpid());
}

static void watches(void)
{
	char folder[] = "/tmp/conform-XXXXXX", path[64], buffer[4096];
	int fd = inotify_init1(IN_NONBLOCK);

	mkdtemp(folder);
	snprintf(path, sizeof(path), "%s/f", folder);
	inotify_add_watch(fd, folder, IN_CREATE | IN_CLOSE_WRITE | IN_DELETE);
	close(open(path, O_CREAT | O_WRONLY, 0600));
	unlink(path);
	ssize_t length = read(fd, buffer, sizeof(buffer));
	for (char *at = buffer; at < buffer + length;) {
		struct inotify_event *event = (void *)at;

		say("%x %s", event->mask, event->name);
		at += sizeof(*event) + event->len;
	}
	rmdir(folder);
}

static void passing(void)
{
	int pair[2], ends[2], fd = -1;
	char byte = 'x', space[CMSG_SPACE(sizeof(int))];
	struct iovec data = { &byte, 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = space,
				  .msg_controllen = sizeof(space) };
	struct ucred peer;
	socklen_t length = sizeof(peer);

	socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
	pipe(ends);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	*header = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
	memcpy(CMSG_DATA(header), &ends[1], sizeof(int));
	say_call("send", sendmsg(pair[0], &message, 0));
	close(ends[1]);
	say_call("receive", recvmsg(pair[1], &message, MSG_CMSG_CLOEXEC));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	write(fd, "y", 1);
	say_call("read", read(ends[0], &byte, 1));
	say("%c, close on exec %d", byte, fcntl(fd, F_GETFD));
	getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &peer, &length);
	say("peer %d", peer.pid == getpid());
}

static void pipes(void)
{
	int ends[2];
	char block[PAGE];

	pipe2(ends, O_NONBLOCK);
	memset(block, 1, sizeof(block));
	long total = 0, got;
	while ((got = write(ends[1], block, sizeof(block))) > 0)
		total += got;
	say_call("full", got);
	say("after %ld", total);
	int fd = scratch_file();
	say("splice %zd", splice(ends[0], NULL, fd, NULL, 3 * PAGE, 0));
	lseek(fd, 0, SEEK_SET);
	int other = scratch_file();
	say("sendfile %zd", sendfile(other, fd, NULL, 2 * PAGE));
	signal(SIGPIPE, SIG_IGN);
	close(ends[0]);
	say_call("no reader", write(ends[1], block, 1));
}

static void locks(void)
{
	int fd = scratch_file(), status;
	struct flock all = { .l_type = F_WRLCK };
	pid_t child;

	say_call("record lock", fcntl(fd, F_SETLK, &all));
	child = fork();
	if (child == 0) {
		all.l_type = F_WRLCK;
		_exit(fcntl(fd, F_SETLK, &all) == -1 ? errno : 0);
	}
	waitpid(child, &status, 0);
	say("another process: %s", strerrorname_np(WEXITSTATUS(status)));
	say_call("flock", flock(fd, LOCK_EX | LOCK_NB));
	int sealed = memfd_create("s", MFD_ALLOW_SEALING);
	ftruncate(sealed, PAGE);
	say_call("seal", fcntl(sealed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE));
	say_call("shrink", ftruncate(sealed, 0));
	say_call("write", write(sealed, "x", 1));
}

static void odd_calls(void)
{
	volatile uintptr_t low = 1;

	say_call("unknown call", syscall(9999));
	say_call("x32 call", syscall(0x40000000 | SYS_getpid));
	say_call("negative call", syscall(-5));
	say_call("bad address", write(1, (void *)low, 1));
	say_call("kernel address", write(1, (void *)0xffffffff81000000UL, 1));
	say_call("read into text", read(open("/dev/zero", O_RDONLY), (void *)odd_calls, 1));
}

const struct fact files[] = {
	{ "polls", polls },	{ "events", events }, { "signals_as_files", signals_as_files },
	{ "watches", watches }, { "passing", passing }, { "pipes", pipes },
	{ "locks", locks },	{ "odd_calls", odd_calls }, { 0 },
};
