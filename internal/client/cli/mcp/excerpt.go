package mcp

import (
	"fmt"
	"strings"
)

// excerpt keeps the beginning and the end of what is written to it, maxOutput bytes together.
type excerpt struct {
	head, tail []byte
	cut        int64 // bytes between them that are gone
}

// Write implements io.Writer. It never fails.
func (e *excerpt) Write(p []byte) (int, error) {
	n := len(p)
	if space := maxOutput/2 - len(e.head); space > 0 {
		space = min(space, len(p))
		e.head, p = append(e.head, p[:space]...), p[space:]
	}
	e.tail = append(e.tail, p...)
	if over := len(e.tail) - maxOutput/2; over > 0 {
		e.cut += int64(over)
		e.tail = append(e.tail[:0], e.tail[over:]...)
	}
	return n, nil
}

// String has a note where bytes are missing. What is not UTF-8 is replaced.
func (e *excerpt) String() string {
	text := string(e.head) + string(e.tail)
	if e.cut > 0 {
		text = fmt.Sprintf("%s\n[… %d bytes left out …]\n%s", e.head, e.cut, e.tail)
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
