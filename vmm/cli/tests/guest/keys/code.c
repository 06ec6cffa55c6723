/* Attacks by code of one's own, and code that only looks like it. */
#include "keys.h"

/* A child calls the code, which must not come back with the keys open. */
static int call(const void *code, unsigned long argument)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		catch_faults();
		((void (*)(unsigned long))code)(argument);
		_exit(is_readable(secret));
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

static unsigned char *room(int protection)
{
	return mmap((void *)CODE, 2 * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
		    0);
}

int own_code(void)
{
	unsigned char *code = room(PROT_READ | PROT_WRITE | PROT_EXEC);

	memcpy(code + 512, open_keys, OPEN_KEYS);
	if (call(code + 512, 0))
		return 1;
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
	return call(code + 512, 0);
}

/* The instruction begins in one page and ends in the next. */
int own_code_across(void)
{
	for (int in_first = 1; in_first <= 2; in_first++) {
		unsigned char *code = room(PROT_READ | PROT_WRITE | PROT_EXEC);
		unsigned char *at = code + PAGE - 6 - in_first;

		memcpy(at, open_keys, OPEN_KEYS);
		/* The second page is executed first, alone. */
		code[PAGE + 64] = 0xc3;
		((void (*)(void))(code + PAGE + 64))();
		if (call(at, 0))
			return 1;
	}
	return 0;
}

/* The same memory at two addresses: one is written to, one is executed. */
int own_code_shared(void)
{
	int fd = memfd_create("code", 0);
	unsigned char *data, *code;

	ftruncate(fd, PAGE);
	data = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	code = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0);
	data[0] = 0xc3;
	call(code, 0);
	memcpy(data, open_keys, OPEN_KEYS);
	return call(code, 0);
}

/* The code is harmless when it is looked at, and changes then. */
int own_code_later(void)
{
	unsigned char *code = room(PROT_READ | PROT_WRITE | PROT_EXEC);
	char name[] = "/tmp/codeXXXXXX";
	int fd = mkstemp(name), status;
	unsigned char page[PAGE] = { 0xc3 };

	/* By a write of its own, after a call */
	code[0] = 0xc3;
	((void (*)(void))code)();
	memcpy(code, open_keys, OPEN_KEYS);
	if (call(code, 0))
		return 1;

	/* By the guest kernel, which reads into it */
	if (fd < 0)
		return 0;
	write(fd, open_keys, OPEN_KEYS);
	pid_t child = fork();
	if (child == 0) {
		catch_faults();
		code[0] = 0xc3;
		((void (*)(void))code)();
		pread(fd, code, OPEN_KEYS, 0);
		((void (*)(void))code)();
		_exit(is_readable(secret));
	}
	waitpid(child, &status, 0);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 1)
		return 1;

	/* By way of the file */
	pwrite(fd, page, PAGE, 0);
	code = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
	call(code, 0);
	pwrite(fd, open_keys, OPEN_KEYS, 0);
	unlink(name);
	return call(code, 0);
}

int own_gs(void)
{
	unsigned char *code = room(PROT_READ | PROT_WRITE | PROT_EXEC);
	static char memory[65536];
	int status;
	pid_t child;

	memcpy(code + 512, set_gs, SET_GS);
	child = fork();
	if (child == 0) {
		((void (*)(unsigned long))(code + 512))((unsigned long)memory + 32768);
		_exit(1);
	}
	waitpid(child, &status, 0);
	/* Nor may the guest kernel do it for a program. */
	return (WIFEXITED(status) && WEXITSTATUS(status) == 1) ||
	       syscall(SYS_arch_prctl, 0x1001, memory + 32768) == 0;
}

/* Any program can clear it: calls and signals go on. */
int clear_gs(void)
{
	pid_t parent = getppid();

	for (int i = 0; i < 200; i++) {
		__asm__ volatile("mov %0, %%gs" : : "r"(0));
		if (syscall(SYS_getppid) != parent)
			return 1;
		if (i % 10 == 0)
			sched_yield();
	}
	return 0;
}

static volatile int traps;

static void on_trap(int signal)
{
	(void)signal;
	traps++;
}

/* Direction, alignment check and trap flag in a call */
int bad_flags(void)
{
	static const unsigned long flags[] = { 1 << 10, 1 << 18, 1 << 8, 1 << 18 | 1 << 10 };
	pid_t parent = getppid();

	signal(SIGTRAP, on_trap);
	for (int i = 0; i < 200; i++) {
		long result = SYS_getppid;

		__asm__ volatile("pushf\n\torq %[flags], (%%rsp)\n\tpopf\n\tsyscall\n\t"
				 "pushf\n\tandq $~0x40500, (%%rsp)\n\tpopf"
				 : "+a"(result)
				 : [flags] "r"(flags[i % 4])
				 : "rcx", "r11", "memory");
		if (result != parent)
			return 1;
	}
	return 0;
}

/* mov $N,%eax; ret, again and again: code of one's own must be what was written. */
int execute_written(void)
{
	unsigned char *code = room(PROT_READ | PROT_WRITE | PROT_EXEC);

	for (int n = 0; n < 200; n++) {
		unsigned char *at = code + (n % 2 ? 100 : PAGE + 100);

		at[0] = 0xb8;
		memcpy(at + 1, &n, sizeof(n));
		at[5] = 0xc3;
		if (((int (*)(void))at)() != n)
			return 1;
	}
	mprotect(code, 2 * PAGE, PROT_READ | PROT_WRITE);
	code[101] = 7;
	mprotect(code, 2 * PAGE, PROT_READ | PROT_EXEC);
	if ((((int (*)(void))(code + 100))() & 0xff) != 7)
		return 1;
	/* A child's changes are its own. */
	mprotect(code, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
	pid_t child = fork();
	if (child == 0) {
		code[101] = 9;
		_exit((((int (*)(void))(code + 100))() & 0xff) != 9);
	}
	int status;
	waitpid(child, &status, 0);
	return status != 0 || (((int (*)(void))(code + 100))() & 0xff) != 7;
}
