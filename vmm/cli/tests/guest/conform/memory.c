/* Mappings: what is visible where, and which access faults. */
#include "conform.h"

#include <sys/uio.h>

static sigjmp_buf back;
static volatile int fault_signal, fault_code;
static void *volatile fault_address;

static void on_fault(int signal, siginfo_t *info, void *context)
{
	(void)context;
	fault_signal = signal;
	fault_code = info->si_code;
	fault_address = info->si_addr;
	siglongjmp(back, 1);
}

/* Says what an access to `at` does. */
static void say_access(const char *what, volatile char *at, int write)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };

	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	if (sigsetjmp(back, 1)) {
		say("%s: SIG%s code %d, address %s", what, sigabbrev_np(fault_signal), fault_code,
		    fault_address == at ? "right" : "wrong");
		return;
	}
	if (write)
		*at = 'w';
	say("%s: %d", what, *at);
}

static char *map(size_t pages, int protection, int flags)
{
	return mmap(NULL, pages * PAGE, protection, flags, -1, 0);
}

static void fixed(void)
{
	char *at = map(4, RW, ANON);

	memset(at, 'a', 4 * PAGE);
	mmap(at + PAGE, PAGE, RW, ANON | MAP_FIXED, -1, 0);
	say("%d %d %d", at[0], at[PAGE], at[2 * PAGE]);
	mmap(at + 2 * PAGE, PAGE, PROT_READ, ANON | MAP_FIXED, -1, 0);
	say_access("write to what was replaced", at + 2 * PAGE, 1);
	say_call("noreplace", (long)mmap(at, PAGE, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0));
	munmap(at + PAGE, PAGE);
	say_access("read of a hole", at + PAGE, 0);
	say_call("page zero", (long)mmap(NULL, PAGE, RW, ANON | MAP_FIXED, -1, 0) == -1 ? -1 : 0);
}

/* Calls code at a place that may not run. */
static void say_run(const char *what, char *at)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };

	sigaction(SIGSEGV, &action, NULL);
	if (!sigsetjmp(back, 1)) {
		((void (*)(void))at)();
		say("%s runs", what);
	} else {
		say("%s: SIG%s code %d", what, sigabbrev_np(fault_signal), fault_code);
	}
}

static void protections(void)
{
	char *at = map(3, RW, ANON);

	memset(at, 'a', 3 * PAGE);
	mprotect(at + PAGE, PAGE, PROT_READ);
	say_access("read of a read-only page", at + PAGE, 0);
	say_access("write to a read-only page", at + PAGE, 1);
	mprotect(at + PAGE, PAGE, PROT_NONE);
	say_access("read of a page without rights", at + PAGE, 0);
	say_access("write beside it", at + 2 * PAGE, 1);
	mprotect(at + PAGE, PAGE, RW);
	say_access("read after it is given back", at + PAGE, 0);
	at[0] = (char)0xc3;
	mprotect(at, PAGE, PROT_READ | PROT_EXEC);
	((void (*)(void))at)();
	say("code that was written runs");
	mprotect(at, PAGE, RW);
	say_run("a page that was code", at);

	char *heap = sbrk(PAGE), stack[] = { (char)0xc3 };

	*heap = (char)0xc3;
	say_run("heap", heap);
	say_run("stack", stack);
}

static void remapping(void)
{
	char *at = map(2, RW, ANON), *other;

	memset(at, 'a', 2 * PAGE);
	other = mremap(at, 2 * PAGE, 64 * PAGE, MREMAP_MAYMOVE);
	say("grown: %d %d %d", other[0], other[PAGE], other[2 * PAGE]);
	at = map(4, RW, ANON);
	memset(at, 'b', 4 * PAGE);
	other = mremap(other, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at + PAGE);
	say("moved onto another: %d %d %d", at[0], at[PAGE], at[2 * PAGE]);
	say_call("shrunk", (long)mremap(at, 4 * PAGE, PAGE, 0) == -1 ? -1 : 0);
	say_access("behind the new end", at + PAGE, 0);
}

static void advice(void)
{
	char *at = map(2, RW, ANON);

	memset(at, 'a', 2 * PAGE);
	say_call("dontneed", madvise(at, PAGE, MADV_DONTNEED));
	say("%d %d", at[0], at[PAGE]);
	say_call("free", madvise(at + PAGE, PAGE, MADV_FREE));
	at[PAGE] = 'b';
	say("written after free: %d", at[PAGE]);
	at = map(1, RW, MAP_SHARED | MAP_ANONYMOUS);
	at[0] = 'c';
	say_call("remove", madvise(at, PAGE, MADV_REMOVE));
	say("%d", at[0]);
	say_call("nonsense", madvise(at, PAGE, 12345));
}

static void shared(void)
{
	volatile char *both = map(2, RW, MAP_SHARED | MAP_ANONYMOUS), *own = map(1, RW, ANON);
	pid_t child;

	both[0] = own[0] = 1;
	child = fork();
	if (child == 0) {
		both[0] = own[0] = 2;
		both[PAGE] = 3; /* first touched here */
		_exit(0);
	}
	waitpid(child, NULL, 0);
	say("shared %d %d, private %d", both[0], both[PAGE], own[0]);
}

static void two_mappings(void)
{
	int fd = memfd_create("two", 0);
	volatile char *a, *b, *c;

	ftruncate(fd, 2 * PAGE);
	a = mmap(NULL, 2 * PAGE, RW, MAP_SHARED, fd, 0);
	b = mmap(NULL, PAGE, RW, MAP_SHARED, fd, PAGE);
	c = mmap(NULL, 2 * PAGE, RW, MAP_PRIVATE, fd, 0);
	a[PAGE] = 'x';
	say("second view %d, private view %d", b[0], c[PAGE]);
	c[PAGE] = 'y';
	a[PAGE] = 'z';
	say("second view %d, written private view %d", b[0], c[PAGE]);
	char byte;
	pread(fd, &byte, 1, PAGE);
	say("read %d", byte);
	pwrite(fd, "q", 1, PAGE);
	say("after write %d", a[PAGE]);
}

static void truncated(void)
{
	int fd = scratch_file();
	char *at;

	ftruncate(fd, 3 * PAGE);
	at = mmap(NULL, 3 * PAGE, RW, MAP_SHARED, fd, 0);
	memset(at, 'a', 3 * PAGE);
	ftruncate(fd, PAGE + 100);
	say_access("within", at + PAGE + 99, 0);
	say_access("rest of the last page", at + PAGE + 100, 0);
	say_access("behind the end", at + 2 * PAGE, 0);
	ftruncate(fd, 3 * PAGE);
	say_access("after it grew again", at + 2 * PAGE, 0);
}

static void own_memory(void)
{
	int fd = open("/proc/self/mem", O_RDWR);
	char *at = map(1, PROT_READ, ANON), byte = 0;
	struct iovec from, to = { &byte, 1 };

	say_call("write to a read-only page", pwrite(fd, "m", 1, (off_t)at));
	say("%d", at[0]);
	say_call("read", pread(fd, &byte, 1, (off_t)at));
	say("%d", byte);
	munmap(at, PAGE);
	say_call("read of a hole", pread(fd, &byte, 1, (off_t)at));
	from = (struct iovec){ &fd, 1 };
	say_call("process_vm_readv", process_vm_readv(getpid(), &to, 1, &from, 1, 0));
	from.iov_base = at;
	say_call("of a hole", process_vm_readv(getpid(), &to, 1, &from, 1, 0));
	say_call("read(2) into a hole", read(open("/dev/zero", O_RDONLY), at, 1));
}

static void deep(int levels)
{
	volatile char frame[PAGE];

	frame[0] = levels;
	if (levels > 0)
		deep(levels - 1);
	frame[1] = frame[0];
}

static void reservations(void)
{
	char *at = mmap(NULL, 64UL << 30, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
	unsigned char present[3];

	say("64 GB reserved: %s", at == MAP_FAILED ? "no" : "yes");
	mprotect(at + (32UL << 30), PAGE, RW);
	at[32UL << 30] = 1;
	say_call("unmapped", munmap(at, 64UL << 30));
	deep(1000);
	say("a stack of 4 MB grows");
	at = map(3, RW, ANON);
	at[PAGE] = 1;
	mincore(at, 3 * PAGE, present);
	say("present %d %d %d", present[0] & 1, present[1] & 1, present[2] & 1);
	char *end = sbrk(0);
	sbrk(16 * PAGE);
	end[15 * PAGE] = 1;
	say_call("brk back", brk(end));
	say_call("mlock", mlock(at, PAGE));
}

const struct fact memory[] = {
	{ "fixed", fixed },	      { "protections", protections }, { "remapping", remapping },
	{ "advice", advice },	      { "shared", shared },	      { "two_mappings", two_mappings },
	{ "truncated", truncated },   { "own_memory", own_memory },   { "reservations", reservations },
	{ 0 },
};
