/* The recursive Fibonacci function, as a process that does nothing else. */
#include <stdlib.h>

static int fib(int n)
{
	return n < 2 ? n : fib(n - 1) + fib(n - 2);
}

int main(int argc, char **argv)
{
	return argc != 2 || fib(atoi(argv[1])) < 0;
}
