// Command probe is the first process of a test's sandbox. It sets up things that may or may
// not survive a restore, and answers over TCP, a line for a line, how they are.
package main

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "child" {
		child()
		return
	}
	answers := setUp()
	l, err := net.Listen("tcp", ":7000")
	check(err)
	for {
		c, err := l.Accept()
		if err != nil {
			continue
		}
		go serve(c, answers)
	}
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func serve(c net.Conn, answers map[string]func(string) string) {
	defer c.Close()
	open.Add(1)
	defer open.Add(-1)
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		if f, ok := answers[word]; ok {
			fmt.Fprintln(c, strings.ReplaceAll(f(rest), "\n", ","))
		} else {
			fmt.Fprintln(c, "unknown")
		}
	}
}

// sparsely is the distance of pages that are there, in memory where few are.
const sparsely = 300 * 4096

// sparseByte is a byte of that memory. Of ten pages that are there, one is zero.
func sparseByte(i int) byte {
	if i%(10*sparsely) == 0 || i%sparsely != 0 {
		return 0
	}
	return byte(i/sparsely) | 1
}

// open counts connections that have not ended here.
var open atomic.Int64

func setUp() map[string]func(string) string {
	var counter atomic.Int64
	var hold, zeros [][]byte
	var sparse []byte
	random := make([]byte, 16)
	_, _ = rand.Read(random)
	return map[string]func(string) string{
		"add":      func(string) string { return fmt.Sprint(counter.Add(1)) },
		"identity": func(string) string { return hex.EncodeToString(random) },
		"random": func(string) string {
			b := make([]byte, 16)
			_, _ = rand.Read(b)
			return hex.EncodeToString(b)
		},
		"bootid":   func(string) string { return text("/proc/sys/kernel/random/boot_id") },
		"hostname": func(string) string { h, _ := os.Hostname(); return h },
		"env":      func(name string) string { return os.Getenv(name) },
		"address":  func(string) string { return address() },
		"clock":    func(string) string { return fmt.Sprint(time.Now().Unix()) },
		"pid":      func(string) string { return fmt.Sprint(os.Getpid()) },
		"conns":    func(string) string { return fmt.Sprint(open.Load()) },
		"hold": func(mebi string) string {
			n, _ := strconv.Atoi(mebi)
			b := make([]byte, n<<20)
			for i := 0; i < len(b); i += 8 {
				binary.LittleEndian.PutUint64(b[i:], noise(uint64(i)))
			}
			hold = append(hold, b)
			return "ok"
		},
		"zeros": func(mebi string) string {
			n, _ := strconv.Atoi(mebi)
			b := make([]byte, n<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 0 // a page that is there
			}
			zeros = append(zeros, b)
			return "ok"
		},
		"held": func(string) string {
			bad := 0
			for _, b := range hold {
				for i := 0; i < len(b); i += 8 {
					if binary.LittleEndian.Uint64(b[i:]) != noise(uint64(i)) {
						bad++
					}
				}
			}
			return fmt.Sprintf("%d %d", len(hold), bad)
		},
		"sparse": func(mebi string) string {
			n, _ := strconv.Atoi(mebi)
			sparse = make([]byte, n<<20)
			for i := 0; i < len(sparse); i += sparsely {
				sparse[i] = sparseByte(i)
			}
			return "ok"
		},
		"spared": func(string) string {
			for i, b := range sparse {
				if want := sparseByte(i); b != want {
					return fmt.Sprintf("%d at %d, want %d", b, i, want)
				}
			}
			return fmt.Sprint(len(sparse))
		},
		"write": func(rest string) string {
			path, body, _ := strings.Cut(rest, " ")
			if err := os.WriteFile(path, []byte(body), 0o644); err != nil {
				return err.Error()
			}
			return "ok"
		},
		"read":    text,
		"timer":   timer(),
		"ticker":  ticker(),
		"threads": threads(),
		"epoll":   epoll(),
		"unix":    unixSocket(),
		"pair":    pair(),
		"udp":     udp(),
		"deleted": deletedFile("/deleted"),
		"shm":     deletedFile("/dev/shm/deleted"),
		"open":    openFile("/open"),
		"mapped":  mapped("/mapped"),
		"fifo":    fifo("/fifo"),
		"inotify": inotify("/tmp"),
		"lock":    lock("/lock"),
		"clocks":  clocks,
		"keep": func(path string) string { // open for reading, and read through
			f, err := os.Open(path)
			check(err)
			kept = f
			return kepts("")
		},
		"kept": kepts,
		"unsavable": func(string) string { // an open pipe that lost its name
			f := fifo("/unsavable")
			check(os.Remove("/unsavable"))
			return f("")
		},
		"child": children(),
	}
}

// kept is a file that another process may change.
var kept *os.File

func kepts(string) string {
	b := make([]byte, 4096)
	n, err := kept.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return err.Error()
	}
	return strings.TrimSpace(string(b[:n]))
}

// noise is a number that looks random, and cannot be made smaller.
func noise(i uint64) uint64 {
	i *= 0x9e3779b97f4a7c15
	i = (i ^ i>>30) * 0xbf58476d1ce4e5b9
	i = (i ^ i>>27) * 0x94d049bb133111eb
	return i ^ i>>31
}

func text(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

func address() string {
	addrs, _ := net.InterfaceAddrs()
	var all []string
	for _, a := range addrs {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.To4() != nil && !ip.IP.IsLoopback() {
			all = append(all, ip.IP.String())
		}
	}
	return strings.Join(all, ",")
}

// timer is set for an hour, and shortened on request.
func timer() func(string) string {
	t := time.NewTimer(time.Hour)
	return func(string) string {
		t.Reset(time.Millisecond)
		<-t.C
		return "fired"
	}
}

// ticker waits for the next tick of a ticker that was started at the start.
func ticker() func(string) string {
	var ticks atomic.Int64
	tick := make(chan struct{})
	go func() {
		for range time.Tick(5 * time.Millisecond) {
			ticks.Add(1)
			select {
			case tick <- struct{}{}:
			default:
			}
		}
	}()
	return func(string) string { <-tick; <-tick; return "ticks" }
}

// threads passes a number through threads of their own.
func threads() func(string) string {
	first := make(chan int)
	in := first
	for range 16 {
		out := make(chan int)
		go func(in, out chan int) {
			runtime.LockOSThread()
			for n := range in {
				out <- n + 1
			}
		}(in, out)
		in = out
	}
	return func(string) string { first <- 0; return fmt.Sprint(<-in) }
}

// epoll waits in the kernel for a pipe.
func epoll() func(string) string {
	var p [2]int
	check(syscall.Pipe(p[:]))
	ep, err := syscall.EpollCreate1(0)
	check(err)
	check(syscall.EpollCtl(ep, syscall.EPOLL_CTL_ADD, p[0], &syscall.EpollEvent{Events: syscall.EPOLLIN, Fd: int32(p[0])}))
	out := make(chan string)
	go func() {
		var events [1]syscall.EpollEvent
		for {
			n, err := syscall.EpollWait(ep, events[:], -1)
			if err == syscall.EINTR {
				continue
			}
			b := make([]byte, 16)
			if n == 1 && err == nil {
				n, err = syscall.Read(p[0], b)
			}
			out <- fmt.Sprintf("%s %v", b[:max(n, 0)], err)
		}
	}()
	return func(string) string { _, _ = syscall.Write(p[1], []byte("ping")); return <-out }
}

func unixSocket() func(string) string {
	_ = os.Remove("/tmp.sock")
	l, err := net.Listen("unix", "/tmp.sock")
	check(err)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
		}
	}()
	old, err := net.Dial("unix", "/tmp.sock")
	check(err)
	return func(string) string {
		fresh, err := net.Dial("unix", "/tmp.sock")
		if err != nil {
			return err.Error()
		}
		defer fresh.Close()
		return echo(old) + echo(fresh)
	}
}

func echo(c net.Conn) string {
	b := make([]byte, 2)
	if _, err := c.Write([]byte("hi")); err != nil {
		return err.Error()
	}
	if _, err := io.ReadFull(c, b); err != nil {
		return err.Error()
	}
	return string(b)
}

// pair is a connection over the loopback interface.
func pair() func(string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	a, err := net.Dial("tcp", l.Addr().String())
	check(err)
	b, err := l.Accept()
	check(err)
	go func() { _, _ = io.Copy(b, b) }()
	return func(string) string { return echo(a) }
}

func udp() func(string) string {
	a, err := net.ListenPacket("udp", "127.0.0.1:0")
	check(err)
	return func(string) string {
		if _, err := a.WriteTo([]byte("hi"), a.LocalAddr()); err != nil {
			return err.Error()
		}
		b := make([]byte, 2)
		_, _, err := a.ReadFrom(b)
		return fmt.Sprintf("%s %v", b, err)
	}
}

// deletedFile is a file that is open and has no name.
func deletedFile(path string) func(string) string {
	f, err := os.Create(path)
	check(err)
	_, err = f.WriteString("here")
	check(err)
	check(os.Remove(path))
	return func(string) string {
		b := make([]byte, 4)
		_, err := f.ReadAt(b, 0)
		return fmt.Sprintf("%s %v", b, err)
	}
}

// openFile is a file that is written to again and again.
func openFile(path string) func(string) string {
	f, err := os.Create(path)
	check(err)
	return func(line string) string {
		if _, err := f.WriteString(line + "\n"); err != nil {
			return err.Error()
		}
		return text(path)
	}
}

// mapped is a file in memory, shared with the file system.
func mapped(path string) func(string) string {
	f, err := os.Create(path)
	check(err)
	check(f.Truncate(4096))
	m, err := syscall.Mmap(int(f.Fd()), 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	check(err)
	copy(m, "0")
	return func(string) string {
		m[0]++
		b := make([]byte, 1)
		_, err := f.ReadAt(b, 0)
		return fmt.Sprintf("%s %v", b, err)
	}
}

// fifo is a pipe with a name.
func fifo(path string) func(string) string {
	_ = os.Remove(path)
	check(syscall.Mkfifo(path, 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	check(err)
	return func(string) string {
		_, _ = f.WriteString("hi")
		b := make([]byte, 2)
		_, err := f.Read(b)
		return fmt.Sprintf("%s %v", b, err)
	}
}

// inotify reports new files.
func inotify(dir string) func(string) string {
	fd, err := syscall.InotifyInit()
	check(err)
	_, err = syscall.InotifyAddWatch(fd, dir, syscall.IN_CREATE)
	check(err)
	return func(name string) string {
		path := filepath.Join(dir, name)
		_ = os.WriteFile(path, nil, 0o600)
		_ = os.Remove(path)
		n, err := syscall.Read(fd, make([]byte, 512))
		return fmt.Sprint(n > 0, err)
	}
}

// lock holds an exclusive file lock.
func lock(path string) func(string) string {
	held, err := os.Create(path)
	check(err)
	check(syscall.Flock(int(held.Fd()), syscall.LOCK_EX))
	return func(string) string {
		f, err := os.Open(path)
		check(err)
		defer f.Close()
		defer runtime.KeepAlive(held)
		return fmt.Sprint(syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB))
	}
}

// clocks are the wall clock and the monotonic one in milliseconds.
func clocks(string) string {
	var real, monotonic syscall.Timespec
	_, _, _ = syscall.Syscall(syscall.SYS_CLOCK_GETTIME, 0, uintptr(unsafe.Pointer(&real)), 0)
	_, _, _ = syscall.Syscall(syscall.SYS_CLOCK_GETTIME, 1, uintptr(unsafe.Pointer(&monotonic)), 0)
	return fmt.Sprint(real.Nano()/1e6, " ", monotonic.Nano()/1e6)
}

// children returns a child process's PID and its parent's.
func children() func(string) string {
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	check(err)
	cmd := exec.Command(self, "child")
	in, err := cmd.StdinPipe()
	check(err)
	out, err := cmd.StdoutPipe()
	check(err)
	check(cmd.Start())
	lines := bufio.NewReader(out)
	return func(string) string {
		fmt.Fprintln(in, "who")
		line, err := lines.ReadString('\n')
		return strings.TrimSpace(line) + fmt.Sprint(" ", err)
	}
}

func child() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		fmt.Println(os.Getpid(), os.Getppid())
	}
}
