package eventually

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/goleak"
)

// NoGoroutines waits until no goroutine is left but those ignored: on a busy machine they take
// longer to end than goleak waits. The error lists the remaining ones.
func NoGoroutines(ignore ...goleak.Option) error {
	for end := time.Now().Add(Patience); ; {
		err := goleak.Find(ignore...)
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("not within %v", Patience), err)
		}
	}
}

// LeaveNoGoroutines runs the tests of a package from its TestMain, and panics where goroutines are
// left that do not end.
func LeaveNoGoroutines(m interface{ Run() int }, ignore ...goleak.Option) {
	if m.Run() != 0 {
		return // that code is the program's
	}
	if err := NoGoroutines(ignore...); err != nil {
		panic(fmt.Errorf("goroutines are left: %w", err))
	}
}
