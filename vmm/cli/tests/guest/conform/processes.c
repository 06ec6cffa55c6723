/* Making, changing and ending processes and threads. */
#include "conform.h"

#include <asm/prctl.h>
#include <linux/futex.h>
#include <linux/sched.h>
#include <sched.h>
#include <stddef.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/rseq.h>

static void vforks(void)
{
	volatile int seen = 0;
	pid_t child = vfork();

	if (child == 0) {
		seen = 1;
		_exit(3);
	}
	say("written by the child: %d", seen);
	say_end(child);
}

static void clone3s(void)
{
	int pidfd = -1, status;
	siginfo_t info = { 0 };
	struct clone_args args = { .flags = CLONE_PIDFD | CLONE_CLEAR_SIGHAND,
				   .pidfd = (uintptr_t)&pidfd, .exit_signal = SIGCHLD };
	long child = syscall(SYS_clone3, &args, sizeof(args));

	if (child == 0)
		_exit(4);
	say_call("clone3", child);
	say_call("waitid", waitid(P_PIDFD, pidfd, &info, WEXITED));
	say("code %d status %d", info.si_code, info.si_status);
	say_call("signal to a dead one", syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0));
	args = (struct clone_args){ .flags = 1UL << 60 };
	say_call("unknown flag", syscall(SYS_clone3, &args, sizeof(args)));
	say_call("nobody left", waitpid(-1, &status, 0));
}

static void execs(void)
{
	char folder[400];
	ssize_t length = readlink("/proc/self/exe", folder, sizeof(folder) - 1);
	static const char *const programs[] = { "conform", "conform-pie" };

	folder[length > 0 ? length : 0] = 0;
	*strrchr(folder, '/') = 0;
	for (int p = 0; p < 2; p++) {
		char path[500];
		pid_t child = fork();

		snprintf(path, sizeof(path), "%s/%s", folder, programs[p]);
		if (child == 0) {
			execl(path, path, "exit", "7", NULL);
			_exit(126);
		}
		say("%s", programs[p]);
		say_end(child);
	}
	pid_t child = fork();
	if (child == 0) {
		execl("/bin/sh", "sh", "-c", "exit 8", NULL);
		_exit(126);
	}
	say_end(child);
	execl("/dev/null", "x", NULL);
	say_call("a device", -1);
	execl("/tmp", "x", NULL);
	say_call("a folder", -1);
}

/* Another thread's exec ends this one and keeps the id. */
static void *exec_in_thread(void *unused)
{
	execl("/bin/sh", "sh", "-c", "exit 6", NULL);
	return unused;
}

static void exec_by_thread(void)
{
	pid_t child = fork();
	pthread_t thread;

	if (child == 0) {
		pthread_create(&thread, NULL, exec_in_thread, NULL);
		pause();
	}
	say_end(child);
}

static void crash(void)
{
	volatile uintptr_t low = 8;

	*(volatile char *)low = 1;
}

static void cores(void)
{
	char folder[] = "/tmp/conform-XXXXXX";
	struct rlimit unlimited = { RLIM_INFINITY, RLIM_INFINITY }, none = { 0, 0 };
	int status;

	mkdtemp(folder);
	chdir(folder);
	setrlimit(RLIMIT_CORE, &unlimited);
	waitpid(child_of(crash), &status, 0);
	say("%s, core %d", status_text(status), WCOREDUMP(status) != 0);
	setrlimit(RLIMIT_CORE, &none);
	waitpid(child_of(crash), &status, 0);
	say("%s", status_text(status));
	system("rm -rf \"$PWD\"");
}

static pthread_mutex_t *robust;

static void *lock_and_die(void *unused)
{
	pthread_mutex_lock(robust);
	return unused;
}

static void robust_locks(void)
{
	pthread_mutexattr_t attributes;
	pthread_t thread;

	robust = mmap(NULL, PAGE, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_mutex_init(robust, &attributes);
	pthread_create(&thread, NULL, lock_and_die, NULL);
	pthread_join(thread, NULL);
	say("after a thread: %s", strerrorname_np(pthread_mutex_lock(robust)));
	pthread_mutex_consistent(robust);
	pthread_mutex_unlock(robust);
	pid_t child = fork();
	if (child == 0) {
		pthread_mutex_lock(robust);
		raise(SIGKILL);
	}
	waitpid(child, NULL, 0);
	say("after a process: %s", strerrorname_np(pthread_mutex_lock(robust)));
}

static int *word;

static void *wake_later(void *unused)
{
	usleep(20000);
	__atomic_store_n(word, 1, __ATOMIC_SEQ_CST);
	(void)unused;
	return (void *)syscall(SYS_futex, word, FUTEX_WAKE, 9, NULL, NULL, 0);
}

static void futexes(void)
{
	struct timespec soon = { 0, 20000000 };
	pthread_t thread;
	void *woken;

	word = mmap(NULL, PAGE, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	say_call("other value", syscall(SYS_futex, word, FUTEX_WAIT, 5, NULL, NULL, 0));
	say_call("timeout", syscall(SYS_futex, word, FUTEX_WAIT, 0, &soon, NULL, 0));
	pthread_create(&thread, NULL, wake_later, NULL);
	say_call("wait", syscall(SYS_futex, word, FUTEX_WAIT, 0, NULL, NULL, 0));
	pthread_join(thread, &woken);
	say("woken %ld", (long)woken);
	*word = 0;
	say_call("lock with inheritance", syscall(SYS_futex, word, FUTEX_LOCK_PI, 0, NULL, NULL, 0));
	say_call("again", syscall(SYS_futex, word, FUTEX_LOCK_PI, 0, NULL, NULL, 0));
	say_call("unlock", syscall(SYS_futex, word, FUTEX_UNLOCK_PI, 0, NULL, NULL, 0));
	say_call("not mapped", syscall(SYS_futex, 4096UL, FUTEX_WAIT, 0, NULL, NULL, 0));
}

static void restartable(void)
{
	struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);

	say("size %s", __rseq_size > 0 ? "some" : "none");
	if (__rseq_size > 0)
		say("cpu known %d", (int)area->cpu_id >= 0);
}

static void controls(void)
{
	char name[16];
	int value = 0;

	say_call("set name", prctl(PR_SET_NAME, "conformist"));
	prctl(PR_GET_NAME, name);
	say("name %s", name);
	say("dumpable %d", prctl(PR_GET_DUMPABLE));
	say_call("death signal", prctl(PR_SET_PDEATHSIG, SIGUSR1));
	prctl(PR_GET_PDEATHSIG, &value);
	say("death signal %d", value);
	say_call("subreaper", prctl(PR_SET_CHILD_SUBREAPER, 1));
	say_call("no new privileges", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	say("%d", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
	say_call("forbid the clock", prctl(PR_SET_TSC, PR_TSC_SIGSEGV));
	say_call("unknown", prctl(987654));
}

static unsigned long in_gs[2] = { 0x1111, 0x2222 };

static void bases(void)
{
	unsigned long value = 0, base = 0;

	say_call("set gs", syscall(SYS_arch_prctl, ARCH_SET_GS, in_gs));
	__asm__ volatile("mov %%gs:8, %0" : "=r"(value));
	say("%lx", value);
	sched_yield();
	usleep(1000);
	__asm__ volatile("mov %%gs:8, %0" : "=r"(value));
	syscall(SYS_arch_prctl, ARCH_GET_GS, &base);
	say("%lx %d", value, base == (unsigned long)in_gs);
	if (getauxval(AT_HWCAP2) & 2) {
		__asm__ volatile("wrgsbase %0" : : "r"(in_gs + 1));
		sched_yield();
		__asm__ volatile("rdgsbase %0" : "=r"(base));
		say("by instruction %d", base == (unsigned long)(in_gs + 1));
	}
	say_call("kernel's half", syscall(SYS_arch_prctl, ARCH_SET_GS, 1UL << 63));
}

static void affinity(void)
{
	cpu_set_t set, got;

	CPU_ZERO(&set);
	CPU_SET(0, &set);
	say_call("to one", sched_setaffinity(0, sizeof(set), &set));
	sched_getaffinity(0, sizeof(got), &got);
	say("%d processor, on %d", CPU_COUNT(&got), sched_getcpu());
	CPU_ZERO(&set);
	say_call("to none", sched_setaffinity(0, sizeof(set), &set));
}

static void *sum(void *argument)
{
	return (void *)((long)argument * 2);
}

static void threads(void)
{
	long total = 0;
	pthread_t ids[50];

	for (long t = 0; t < 50; t++)
		pthread_create(&ids[t], NULL, sum, (void *)t);
	for (int t = 0; t < 50; t++) {
		void *result;

		pthread_join(ids[t], &result);
		total += (long)result;
	}
	say("%ld", total);
	say_call("barrier", syscall(SYS_membarrier, 0 /* QUERY */, 0, 0));
}

const struct fact processes[] = {
	{ "vforks", vforks },
	{ "clone3s", clone3s },
	{ "execs", execs },
	{ "exec_by_thread", exec_by_thread },
	{ "cores", cores },
	{ "robust_locks", robust_locks },
	{ "futexes", futexes },
	{ "restartable", restartable },
	{ "controls", controls },
	{ "bases", bases },
	{ "affinity", affinity },
	{ "threads", threads },
	{ 0 },
};
