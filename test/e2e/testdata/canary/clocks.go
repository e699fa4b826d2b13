package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// timers tick in each of the ways that the kernel has.
func timers() (func() error, error) {
	every := unix.ItimerSpec{Interval: unix.NsecToTimespec(1e7), Value: unix.NsecToTimespec(1e7)}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.TimerfdSettime(fd, 0, &every, nil); err != nil {
		return nil, err
	}
	var ticks [4]atomic.Int64
	threadOf(func() {
		b := make([]byte, 8)
		for {
			if _, err := unix.Read(fd, b); err == nil {
				ticks[0].Add(1)
			}
		}
	})
	alarms := make(chan os.Signal, 1)
	signal.Notify(alarms, syscall.SIGALRM)
	go func() {
		for range alarms {
			ticks[1].Add(1)
		}
	}()
	tick := unix.Itimerval{Interval: unix.Timeval{Usec: 10_000}, Value: unix.Timeval{Usec: 10_000}}
	if _, err := unix.Setitimer(unix.ITIMER_REAL, tick); err != nil {
		return nil, err
	}
	threadOf(func() {
		for {
			pause := unix.NsecToTimespec(1e7)
			_ = unix.Nanosleep(&pause, nil) // interrupted is a tick too
			ticks[2].Add(1)
		}
	})
	go func() {
		for range time.Tick(10 * time.Millisecond) {
			ticks[3].Add(1)
		}
	}()
	early := make(chan struct{})
	time.AfterFunc(time.Hour, func() { close(early) })
	return func() error {
		var found []error
		for i, name := range []string{"timerfd", "setitimer", "nanosleep", "ticker"} {
			before := ticks[i].Load()
			found = append(found, await(name+" ticks", func() bool { return ticks[i].Load() > before+3 }))
		}
		select {
		case <-early:
			found = append(found, errors.New("a timer of an hour is over"))
		default:
		}
		return errors.Join(found...)
	}, nil
}

func clock(id int32) (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(id, &t)
	return time.Duration(t.Nano()), err
}

// clocks never go back.
func clocks() (func() error, error) {
	last := map[int32]time.Duration{unix.CLOCK_MONOTONIC: 0, unix.CLOCK_BOOTTIME: 0, unix.CLOCK_REALTIME: 0, unix.CLOCK_PROCESS_CPUTIME_ID: 0}
	return func() error {
		for id, before := range last {
			now, err := clock(id)
			if err != nil || now < before { // some tick slowly
				return fmt.Errorf("clock %d returned %v, want %v: %v", id, now, before, err) //nolint:errorlint // there may be none
			}
			last[id] = now
		}
		var info unix.Sysinfo_t
		if err := unix.Sysinfo(&info); err != nil || info.Uptime < 0 {
			return fmt.Errorf("uptime %d: %v", info.Uptime, err) //nolint:errorlint // there may be none
		}
		return nil
	}, nil
}

// epoll waits for many at once.
func epoll() (func() error, error) {
	const many = 64
	ep, err := unix.EpollCreate1(0)
	if err != nil {
		return nil, err
	}
	var writers [many]int
	var seen [many]atomic.Int64
	for i := range many {
		var ends [2]int
		if err := unix.Pipe(ends[:]); err != nil {
			return nil, err
		}
		writers[i] = ends[1]
		e := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(ends[0]), Pad: int32(i)}
		if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, ends[0], &e); err != nil {
			return nil, err
		}
	}
	threadOf(func() {
		events, b := make([]unix.EpollEvent, 8), make([]byte, 8)
		for {
			n, _ := unix.EpollWait(ep, events, -1)
			for _, e := range events[:max(n, 0)] {
				if _, err := unix.Read(int(e.Fd), b); err == nil {
					seen[e.Pad].Add(1)
				}
			}
		}
	})
	return func() error {
		for i := range many {
			before := seen[i].Load()
			if _, err := unix.Write(writers[i], []byte{1}); err != nil {
				return err
			}
			if err := await(fmt.Sprintf("event %d", i), func() bool { return seen[i].Load() > before }); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// counter is an eventfd with a number in it, and one with a waiting reader.
func counter() (func() error, error) {
	full, err := unix.Eventfd(7, 0)
	if err != nil {
		return nil, err
	}
	empty, err := unix.Eventfd(0, 0)
	if err != nil {
		return nil, err
	}
	var got atomic.Uint64
	word := func(n uint64) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&n)), 8) }
	threadOf(func() {
		for {
			var n uint64
			if _, err := unix.Read(empty, unsafe.Slice((*byte)(unsafe.Pointer(&n)), 8)); err == nil {
				got.Add(n)
			}
		}
	})
	return func() error {
		var n uint64
		if err := within("read", func() error {
			_, err := unix.Read(full, unsafe.Slice((*byte)(unsafe.Pointer(&n)), 8))
			return err
		}); err != nil {
			return err
		}
		if n != 7 {
			return fmt.Errorf("it has %d", n)
		}
		if _, err := unix.Write(full, word(7)); err != nil {
			return err
		}
		before := got.Load()
		if _, err := unix.Write(empty, word(3)); err != nil {
			return err
		}
		return await("the waiting reader gets it", func() bool { return got.Load() == before+3 })
	}, nil
}

// signalFile is a signalfd.
func signalFile() (func() error, error) {
	var set unix.Sigset_t
	set.Val[0] = 1 << (unix.SIGUSR1 - 1)
	type made struct {
		fd, thread int
		err        error
	}
	first := make(chan made)
	var got atomic.Int64
	threadOf(func() {
		if err := unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil); err != nil {
			first <- made{err: err}
			return
		}
		fd, err := unix.Signalfd(-1, &set, 0)
		first <- made{fd, unix.Gettid(), err}
		b := make([]byte, unsafe.Sizeof(unix.SignalfdSiginfo{}))
		for err == nil {
			if _, err := unix.Read(fd, b); err == nil {
				got.Add(1)
			}
		}
	})
	m := <-first
	return func() error {
		before := got.Load()
		if err := unix.Tgkill(os.Getpid(), m.thread, unix.SIGUSR1); err != nil {
			return err
		}
		return await("the signal comes", func() bool { return got.Load() > before })
	}, m.err
}
