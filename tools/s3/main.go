// S3 serves the directories of one directory as buckets, on the address of its first argument: an S3 server for tests, with
// signatures, multipart uploads and lists. The key of its only account is in the environment.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(address, dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	metadata, err := meta.NewSideCar(os.Args[3])
	if err != nil {
		return fmt.Errorf("open %s: %w", os.Args[3], err)
	}
	backend, err := posix.New(dir, metadata, posix.PosixOpts{SideCarDir: os.Args[3], ForceNoTmpFile: true, ForceNoCopyFileRange: true, CopyObjectThreshold: 5 << 30})
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	return embedgw.RunVersityGW(ctx, backend, &embedgw.Config{
		RootUserAccess: os.Getenv("ACCESS_KEY_ID"), RootUserSecret: os.Getenv("SECRET_ACCESS_KEY"), Ports: []string{address},
		Region: "us-east-1", KeepAlive: true, Quiet: true, MaxConnections: 1024, MaxRequests: 512, MultipartMaxParts: 10000,
	})
}
