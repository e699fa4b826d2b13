package gateway

import "sync"

const (
	smallBlock = 8 << 10
	bigBlock   = 256 << 10
)

var (
	smallBlocks = sync.Pool{New: func() any { return new([smallBlock]byte) }}
	bigBlocks   = sync.Pool{New: func() any { return new([bigBlock]byte) }}
)

// copyBuffer is a buffer for copying a body: large for bulk transfers, small for mostly idle streams,
// of which there may be many.
type copyBuffer struct {
	small *[smallBlock]byte
	big   *[bigBlock]byte
	buf   []byte // of one of them
}

// newBlock takes the length of the body, negative if unknown.
func newBlock(length int64) *copyBuffer {
	b := &copyBuffer{}
	b.resize(length >= bigBlock)
	return b
}

func (b *copyBuffer) resize(big bool) {
	b.free()
	if big {
		b.big = bigBlocks.Get().(*[bigBlock]byte)
		b.buf = b.big[:]
	} else {
		b.small = smallBlocks.Get().(*[smallBlock]byte)
		b.buf = b.small[:]
	}
}

// adapt changes the size by how much of buf the last read used. The content of buf is lost.
func (b *copyBuffer) adapt(used int) {
	switch {
	case b.small != nil && used == smallBlock:
		b.resize(true)
	case b.big != nil && used < smallBlock/2:
		b.resize(false)
	}
}

func (b *copyBuffer) free() {
	if b.small != nil {
		smallBlocks.Put(b.small)
	}
	if b.big != nil {
		bigBlocks.Put(b.big)
	}
	b.small, b.big, b.buf = nil, nil, nil
}
