package endpoint

import "sync"

const (
	smallBlock = 8 << 10
	bigBlock   = 256 << 10
)

var (
	smallBlocks = sync.Pool{New: func() any { return new([smallBlock]byte) }}
	bigBlocks   = sync.Pool{New: func() any { return new([bigBlock]byte) }}
)

// Buffer is a buffer for copying a body: large for bulk transfers, small for mostly idle streams,
// of which there may be many.
type Buffer struct {
	small *[smallBlock]byte
	big   *[bigBlock]byte
	Buf   []byte // of one of them
}

// NewBuffer takes the length of the body, negative if unknown.
func NewBuffer(length int64) *Buffer {
	b := &Buffer{}
	b.resize(length >= bigBlock)
	return b
}

func (b *Buffer) resize(big bool) {
	b.Free()
	if big {
		b.big = bigBlocks.Get().(*[bigBlock]byte)
		b.Buf = b.big[:]
	} else {
		b.small = smallBlocks.Get().(*[smallBlock]byte)
		b.Buf = b.small[:]
	}
}

// Adapt changes the size by how much of buf the last read used. The content of buf is lost.
func (b *Buffer) Adapt(used int) {
	switch {
	case b.small != nil && used == smallBlock:
		b.resize(true)
	case b.big != nil && used < smallBlock/2:
		b.resize(false)
	}
}

// Free returns the buffer to its pool.
func (b *Buffer) Free() {
	if b.small != nil {
		smallBlocks.Put(b.small)
	}
	if b.big != nil {
		bigBlocks.Put(b.big)
	}
	b.small, b.big, b.Buf = nil, nil, nil
}
