package ports

import (
	"context"
	"io"
	"net"
	"sync"
)

// Join carries bytes both ways until both have ended, one broke, or ctx is done, and closes both.
// first is what has been read from a already. An end on one side is passed on as such, so that the
// other may still answer.
func Join(ctx context.Context, a net.Conn, first io.Reader, b net.Conn) {
	shut := sync.OnceFunc(func() { _, _ = a.Close(), b.Close() })
	defer shut()
	defer context.AfterFunc(ctx, shut)()
	var wg sync.WaitGroup
	wg.Go(func() { carry(b, io.MultiReader(first, a), shut) })
	carry(a, b, shut)
	wg.Wait()
}

func carry(to net.Conn, from io.Reader, shut func()) {
	if _, err := io.Copy(to, from); err != nil {
		shut()
		return
	}
	if half, ok := to.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		shut()
	}
}
