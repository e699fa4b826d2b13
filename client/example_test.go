package client_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/barchan-dev/barchan/client"
)

// Needs a server: set BARCHAN_API_URL and BARCHAN_API_KEY, or the variables that `barchan env` prints.
func Example() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		panic(err)
	}
	sbx, err := c.Create(ctx, client.CreateOptions{Timeout: 10 * time.Minute, EnvVars: map[string]string{"GREETING": "hello"}})
	if err != nil {
		panic(err)
	}
	defer func() { _ = sbx.Kill(ctx) }()

	if err := sbx.Files.WriteString(ctx, "name.txt", "world"); err != nil {
		panic(err)
	}
	res, err := sbx.Commands.Run(ctx, `echo "$GREETING $(cat name.txt)"; exit 3`, client.CommandOptions{Stderr: os.Stderr})
	if exit, ok := errors.AsType[*client.ExitError](err); ok {
		fmt.Printf("code %d: %s", exit.ExitCode, res.Stdout)
	} else if err != nil {
		panic(err)
	}
}

// Forks continue with the memory and files of their origin.
func ExampleSandbox_Fork() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		panic(err)
	}
	sbx, err := c.Create(ctx, client.CreateOptions{})
	if err != nil {
		panic(err)
	}
	defer func() { _ = sbx.Kill(ctx) }()
	forks, err := sbx.Fork(ctx, client.ForkOptions{Count: 2})
	if err != nil {
		panic(err)
	}
	for i, f := range forks {
		if f.Error != nil {
			fmt.Println(f.Error.Message)
			continue
		}
		defer func() { _ = f.Sandbox.Kill(ctx) }()
		res, err := f.Sandbox.Commands.Run(ctx, fmt.Sprintf("echo fork %d", i), client.CommandOptions{})
		if err != nil {
			panic(err)
		}
		fmt.Print(res.Stdout)
	}
}
