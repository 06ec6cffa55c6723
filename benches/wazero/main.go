// The wazero side of `exocell bench isolates`: calls the function `run` of a
// module as often as it is told, and answers what that took.
//
//	wazero FILE WORKERS fresh|reused
//
// Each line of standard input is a turn, `CALLS ARGUMENT`; the answer is a line
// with the CPU nanoseconds of the turn. A line `live COUNT` makes COUNT
// instances, calls each once, and answers how many bytes each added to resident
// memory and page tables.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

func main() {
	if err := serve(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "wazero:", err)
		os.Exit(1)
	}
}

// A subject is one compiled module and how its instances are used.
type subject struct {
	ctx      context.Context
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
	workers  int
	reused   bool
}

func serve(words []string) error {
	if len(words) != 3 {
		return errors.New("wants FILE WORKERS fresh|reused")
	}
	subject, err := load(words[0], words[1], words[2] == "reused")
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer, err := subject.answer(strings.Fields(lines.Text()))
		if err != nil {
			return err
		}
		fmt.Println(answer)
	}
	return lines.Err()
}

func load(file, workers string, reused bool) (*subject, error) {
	module, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	count, err := strconv.Atoi(workers)
	if err != nil {
		return nil, err
	}
	runtime.GOMAXPROCS(count)
	ctx := context.Background()
	machine := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigCompiler())
	compiled, err := machine.CompileModule(ctx, module)
	return &subject{ctx, machine, compiled, count, reused}, err
}

func (s *subject) answer(words []string) (int64, error) {
	if len(words) != 2 {
		return 0, errors.New("a turn is CALLS ARGUMENT or live COUNT")
	}
	count, err := strconv.ParseInt(words[1], 10, 64)
	if err != nil {
		return 0, err
	}
	if words[0] == "live" {
		return s.live(count)
	}
	calls, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil {
		return 0, err
	}
	before := cpuNs()
	err = s.turn(calls, uint64(count))
	return cpuNs() - before, err
}

// turn makes calls on all workers, each with instances of its own.
func (s *subject) turn(calls int64, argument uint64) error {
	left := atomic.Int64{}
	left.Store(calls)
	failures := make([]error, s.workers)
	var all sync.WaitGroup
	for worker := range failures {
		all.Add(1)
		go func() {
			defer all.Done()
			failures[worker] = s.work(&left, argument)
		}()
	}
	all.Wait()
	return errors.Join(failures...)
}

func (s *subject) work(left *atomic.Int64, argument uint64) error {
	var instance api.Module
	defer func() { closeInstance(s.ctx, instance) }()
	for left.Add(-1) >= 0 {
		if instance == nil || !s.reused {
			closeInstance(s.ctx, instance)
			var err error
			if instance, err = s.instance(); err != nil {
				return err
			}
		}
		if err := call(s.ctx, instance, argument); err != nil {
			return err
		}
	}
	return nil
}

// instance makes one without a name, so that there can be many.
func (s *subject) instance() (api.Module, error) {
	return s.runtime.InstantiateModule(s.ctx, s.compiled, wazero.NewModuleConfig().WithName(""))
}

func call(ctx context.Context, instance api.Module, argument uint64) error {
	_, err := instance.ExportedFunction("run").Call(ctx, argument)
	return err
}

func closeInstance(ctx context.Context, instance api.Module) {
	if instance != nil {
		instance.Close(ctx)
	}
}

// live counts what instances cost that have been called once and wait.
func (s *subject) live(count int64) (int64, error) {
	instances := make([]api.Module, 0, count)
	before, err := heldBytes()
	if err != nil {
		return 0, err
	}
	for range count {
		instance, err := s.instance()
		if err != nil {
			return 0, err
		}
		if err := call(s.ctx, instance, 1); err != nil {
			return 0, err
		}
		instances = append(instances, instance)
	}
	after, err := heldBytes()
	runtime.KeepAlive(instances)
	return (after - before) / max(count, 1), err
}

// heldBytes is resident memory and page tables, without what the collector frees.
func heldBytes() (int64, error) {
	runtime.GC()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	bytes := int64(0)
	for _, line := range strings.Split(string(status), "\n") {
		words := strings.Fields(line)
		if len(words) > 1 && (words[0] == "VmRSS:" || words[0] == "VmPTE:") {
			kilobytes, err := strconv.ParseInt(words[1], 10, 64)
			if err != nil {
				return 0, err
			}
			bytes += kilobytes << 10
		}
	}
	return bytes, nil
}

// cpuNs is the CPU time of this process and all its threads.
func cpuNs() int64 {
	usage := syscall.Rusage{}
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return usage.Utime.Nano() + usage.Stime.Nano()
}
