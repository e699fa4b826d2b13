package endpoint

import (
	"sync"
	"sync/atomic"
)

const (
	smallBlock = 8 << 10
	bigBlock   = 256 << 10
	// maxBig bounds the big blocks in use, 64 MiB: as many copies may wait for readers that read nothing.
	maxBig = 256
)

var (
	bigInUse    atomic.Int32
	smallBlocks = sync.Pool{New: func() any { return new([smallBlock]byte) }}
	bigBlocks   = sync.Pool{New: func() any { return new([bigBlock]byte) }}
)

// Buffer is a buffer for copying a body: large for bulk transfers, unless there are many, small for mostly idle streams.
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
	if big && bigInUse.Add(1) > maxBig {
		bigInUse.Add(-1)
		big = false
	}
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
		bigInUse.Add(-1)
	}
	b.small, b.big, b.Buf = nil, nil, nil
}
