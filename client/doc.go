// Package client is a Go client of Barchan, in the words of E2B's SDKs. It works with any server of that API.
//
//	c, err := client.New(client.Config{})
//	sbx, err := c.Create(ctx, client.CreateOptions{Timeout: 10 * time.Minute})
//	defer sbx.Kill(ctx)
//	res, err := sbx.Commands.Run(ctx, "uname -a", client.CommandOptions{})
//
// Every call takes a context and ends with it. The zero value of all options is the default. Errors wrap one of the kinds
// [ErrNotFound], [ErrTimeout], [ErrRateLimited] and so on, which errors.Is finds; an answer of the server is an [*Error], and a command that
// ends with another code than 0 an [*ExitError]. The package starts no goroutine that outlives the call, and stores nothing.
package client
